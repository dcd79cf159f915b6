"""States of a sequence's recurrent layers: the current states, and states stored at block boundaries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from swiftbatch.jobs.checkpoints.kv_segments import LayerStates, State
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, TILE_ROWS
from swiftbatch.worker.kernels.native_recurrence import StepBuffers, are_known_states, folding_team, native_fold
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.kv_capacity import FIRST_STEPS
from swiftbatch.worker.kv.kv_capacity import NUM_STEPS as NUM_STEPS
from swiftbatch.worker.model.architectures.recurrent_layers import RecurrentShape


@dataclass(frozen=True)
class LayerState:
    """Immutable state of a layer at a boundary, with the inputs that its convolution reads."""

    state: Tensor  # [num_heads, key_dim, value_dim] float32
    inputs: Tensor  # [conv_width - 1, num_channels]


class RecurrentLayer:
    """One layer's state, and its steps after the boundary.

    `state [num_heads, key_dim, value_dim] float32` is after the committed positions, `base` at the boundary. A step
    makes it `decay * state + key (x) update`.
    """

    def __init__(self, shape: RecurrentShape, dtype: torch.dtype, device: torch.device, num_steps: int) -> None:
        is_known = device.type == "cpu" and are_known_states(shape.num_heads, shape.value_dim)
        self._team = folding_team() if is_known else None
        self._group = shape.num_heads // max(1, shape.num_key_heads)
        self._num_before = shape.conv_width - 1
        state = (shape.num_heads, shape.key_dim, shape.value_dim)
        self.state = self.base = torch.zeros(state, device=device)
        self.inputs = torch.zeros(self._num_before + num_steps, shape.num_channels, dtype=dtype, device=device)
        self.keys = torch.zeros(num_steps, shape.num_key_heads, shape.key_dim, device=device)
        self.updates = torch.zeros(num_steps, shape.num_heads, shape.value_dim, device=device)
        self.decays = torch.zeros(num_steps, shape.num_heads, shape.num_decays, device=device)

    def grow(self, num_steps: int) -> None:
        more = num_steps - len(self.keys)
        names = ("inputs", "keys", "updates", "decays")
        for name, rows in zip(names, self.buffers()[:-1], strict=True):
            setattr(self, name, torch.cat([rows, rows.new_zeros(more, *rows.shape[1:])]))

    def steps(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the steps after the boundary, as `StepBuffers` takes them."""
        return self.inputs[self._num_before :], self.keys, self.updates, self.decays

    def addresses(self) -> tuple[int, int, int, int, int]:
        """Return the addresses of inputs (first those before the boundary), steps and state."""
        inputs, keys, updates, decays, state = (each.data_ptr() for each in self.buffers())
        return inputs, keys, updates, decays, state

    def buffers(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.inputs, self.keys, self.updates, self.decays, self.state

    def convolved(self, steps: Tensor) -> Tensor:
        """Return the convolution's inputs of `steps [num_rows, conv_width]`; those before the boundary are negative."""
        return self.inputs[steps + self._num_before]

    def write_inputs(self, first: int, inputs: Tensor) -> None:
        start = first + self._num_before
        self.inputs[start : start + len(inputs)] = inputs

    def write(self, steps: list[int], keys: Tensor, updates: Tensor, decays: Tensor) -> None:
        self.keys[steps], self.updates[steps], self.decays[steps] = keys, updates, decays

    def heads_of(self, keys: Tensor) -> Tensor:
        return keys.repeat_interleave(self._group, dim=0)

    def folded(self, state: Tensor, steps: list[int]) -> Tensor:
        """Return a state after `steps`; it is in new memory unless `steps` is empty."""
        if steps and self._team is not None:
            return native_fold(self._team, state, self.keys[steps], self.updates[steps], self.decays[steps])
        for step in steps:
            state = state * self.decays[step][:, :, None]
            state = state + self.heads_of(self.keys[step])[:, :, None] * self.updates[step][:, None]
        return state

    def keep_path(self, root: int, path: list[int]) -> None:
        source, target = [root + 1 + node for node in path], list(range(root + 1, root + 1 + len(path)))
        for rows in self.steps():
            rows[target] = rows[source]

    def move_base(self, num_steps: int) -> None:
        self.base = self.folded(self.base, list(range(num_steps)))
        for rows in (self.inputs, self.keys, self.updates, self.decays):
            rows[: len(rows) - num_steps] = rows[num_steps:].clone()

    def at(self, num_steps: int) -> LayerState:
        """Return the layer's state `num_steps` after the boundary."""
        inputs = self.inputs[num_steps : num_steps + self._num_before].clone()
        return LayerState(self.folded(self.base, list(range(num_steps))), inputs)

    def start_at(self, state: LayerState) -> None:
        self.state = self.base = state.state
        self.inputs[: self._num_before] = state.inputs

    def taken(self, arrays: State, number: int) -> LayerState:
        """Return the layer's part of a checkpoint. Raises ValueError if it does not fit."""
        expected = {"state": self.base, "inputs": self.inputs[: self._num_before]}
        found = {name: _tensor(arrays.get(f"{name}.{number}"), like) for name, like in expected.items()}
        return LayerState(**found)

    def clear(self) -> None:
        self.state = self.base = torch.zeros_like(self.base)
        self.inputs.zero_()


def _tensor(array: np.ndarray | None, like: Tensor) -> Tensor:
    numbers = np.dtype(np.int16 if like.element_size() == 2 else np.float32)
    if array is None or (array.dtype, array.shape) != (numbers, tuple(like.shape)):
        found = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
        raise ValueError(f"found {found} as a part of a layer's state, expected {numbers} {list(like.shape)}")
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(like.dtype).to(like.device)


# States stored at boundaries, and the common base of a sequence's states.


Kept = TypeVar("Kept")
MOST_WANTED = 4  # a state may take 150 MB
NUM_RETURNS = 2  # one of them is a whole distance back


class KeptStates(Generic[Kept]):
    """Stored states: at boundaries that other sequences copy from, and at the last boundaries for rollbacks."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}  # ordered by passing
        self._wanted: list[int] = []  # has the newest last
        self._distance: int | None = None

    def want(self, position: int) -> None:
        """Store the states at a boundary when it is passed; only the last `MOST_WANTED` requests count."""
        if position and position not in self._wanted:
            self._wanted.append(position)
        for dropped in self._wanted[:-MOST_WANTED]:
            self._wanted.remove(dropped)
            self._kept.pop(dropped, None)

    def want_every(self, distance: int) -> None:
        """Store the states at the last two multiples of `distance`."""
        self._distance = max(1, distance)

    def wants(self, position: int) -> bool:
        return position in self._wanted or self._is_return(position)

    def keep(self, position: int, states: Kept) -> None:
        self._kept[position] = states
        returns = [each for each in self._kept if each not in self._wanted]
        for each in returns[:-NUM_RETURNS]:
            del self._kept[each]

    def at(self, position: int) -> Kept | None:
        return self._kept.get(position)

    def nearest(self, limit: int) -> tuple[int, Kept] | None:
        """Return the last position up to `limit` that has stored states, and these states."""
        position = max((each for each in self._kept if each <= limit), default=None)
        return None if position is None else (position, self._kept[position])

    def roll_back(self, length: int) -> None:
        self._kept = {position: states for position, states in self._kept.items() if position <= length}

    def _is_return(self, position: int) -> bool:
        return self._distance is not None and position % self._distance == 0


class StateStore(ABC, Generic[Kept]):
    """Recurrent states of a sequence."""

    boundary = 0  # position of the newest states

    def __init__(self) -> None:
        self._kept = KeptStates[Kept]()

    def retain(self, from_: int, until: int | None) -> None:
        if until is not None:
            self._kept.want(until // BLOCK * BLOCK)
        elif from_ < 0:
            self._kept.want_every(-(from_ // BLOCK) * BLOCK)

    @abstractmethod
    def num_readable(self, length: int, most: int) -> int:
        """Return how many of the next `most` known tokens to read in one call."""

    @abstractmethod
    def move(self, root: int, path: list[int]) -> None:
        """Move the steps of a tree's nodes `path` next to the tree's root, which is at entry `root`."""

    @abstractmethod
    def advance(self, start: int, end: int) -> None:
        """Note that positions `[start, end)` are committed."""

    @abstractmethod
    def cut(self, length: int) -> int:
        """Forget all states after `length` positions; return how many positions are left."""

    @abstractmethod
    def copyable_end(self, limit: int, length: int) -> int:
        """Return the last position, up to `limit` and `length`, whose states other sequences can copy."""

    @abstractmethod
    def at(self, end: int) -> LayerStates:
        """Return the stored states after the first `end` positions, or those of a boundary."""

    @abstractmethod
    def load(self, states: LayerStates, length: int) -> None:
        """Continue from states at a boundary up to `length`. Raises ValueError for states that do not fit."""

    @abstractmethod
    def clear(self) -> None:
        """Reset to the states before the first position."""

    def copy(self, theirs: StateStore[Kept] | None, end: int) -> bool:
        """Copy states from the same device; return False if that is impossible."""
        return False

    @staticmethod
    def _refuse_unfit(states: LayerStates, num_layers: int, length: int) -> None:
        """Raise ValueError unless the states are of all layers and at a boundary up to `length`."""
        end = states.num_positions
        if end % BLOCK or end > length or len(states.arrays) != 2 * num_layers:
            raise ValueError(
                f"found {len(states.arrays)} states of layers behind {end} positions, expected {2 * num_layers} behind "
                f"a multiple of {BLOCK}, at most {length}"
            )


class RecurrentStates(StateStore[list[LayerState]]):
    """States on a CPU; the boundary is a block before the end, so the last block can be rolled back."""

    def __init__(self, shape: CacheShape, recurrent: RecurrentShape) -> None:
        super().__init__()
        self.num_steps = FIRST_STEPS if shape.device.type == "cpu" else NUM_STEPS  # a GPU's memory is planned at once
        self._recurrent, self._is_on_cpu = recurrent, shape.device.type == "cpu"
        self.layers = [
            RecurrentLayer(recurrent, shape.dtype, shape.device, self.num_steps) for _ in range(recurrent.num_layers)
        ]
        self._steps = self._step_buffers()

    def _step_buffers(self) -> StepBuffers | None:
        """Return buffers for the kernels, or None if the kernels do not support the sizes."""
        team, recurrent = folding_team() if self._is_on_cpu else None, self._recurrent
        has_known = not recurrent.num_heads or are_known_states(recurrent.num_heads, recurrent.value_dim)
        return StepBuffers(team, [layer.steps() for layer in self.layers]) if team and has_known else None

    def reserve(self, num_steps: int) -> None:
        """Have room for `num_steps` steps after the boundary. Raises ValueError for more than `NUM_STEPS`."""
        if num_steps > NUM_STEPS:
            raise ValueError(f"found {num_steps} steps behind a boundary, expected {NUM_STEPS} at most")
        if num_steps <= self.num_steps:
            return
        self.num_steps = min(NUM_STEPS, -(-num_steps // TILE_ROWS) * TILE_ROWS)
        for layer in self.layers:
            layer.grow(self.num_steps)
        self._steps = self._step_buffers()

    def num_readable(self, length: int, most: int) -> int:
        """Return how many tokens fit, or how many end at a boundary if these are at least half as many."""
        room = min(most, self.num_steps - (length - self.boundary))
        to_boundary = (length + room) // BLOCK * BLOCK - length
        return to_boundary if 2 * to_boundary >= room else room

    def layer_steps(self) -> np.ndarray:
        return np.array([layer.addresses() for layer in self.layers], dtype=np.int64)

    def held(self) -> list[Tensor]:
        """Return the buffers that `layer_steps` points to."""
        return [each for layer in self.layers for each in layer.buffers()]

    def move(self, root: int, path: list[int]) -> None:
        if path == list(range(len(path))):
            return
        step = root - self.boundary
        if self._steps is not None:
            self._steps.keep(step + 1, path)
            return
        for layer in self.layers:
            layer.keep_path(step, path)

    def advance(self, start: int, end: int) -> None:
        """Move the states to the end of the committed positions, and the boundary to at most two blocks before it."""
        if end - self.boundary > self.num_steps:  # true only in benchmarks of forwards, over unwritten positions
            self.boundary = end // BLOCK * BLOCK
            return
        self._fold(start - self.boundary, end - self.boundary)
        while end - self.boundary >= 2 * BLOCK:
            for layer in self.layers:
                layer.move_base(BLOCK)
            self.boundary += BLOCK
            if self._kept.wants(self.boundary):
                self._kept.keep(self.boundary, [layer.at(0) for layer in self.layers])

    def cut(self, length: int) -> int:
        """Forget as `StateStore.cut` does; if `length` is before the boundary, go back to a stored state."""
        self._kept.roll_back(length)
        if length and length >= self.boundary:
            for layer in self.layers:
                layer.state = layer.folded(layer.base, list(range(length - self.boundary)))
            return length
        self.clear()
        self.boundary = 0
        if nearest := self._kept.nearest(length):
            self._start_at(*nearest)
        return self.boundary

    def clear(self) -> None:
        for layer in self.layers:
            layer.clear()

    def at(self, end: int) -> LayerStates:
        kept = self._kept.at(end)
        layers = [layer.at(end - self.boundary) for layer in self.layers] if kept is None else kept
        arrays = {f"{part}.{number}": each for number, layer in enumerate(layers) for part, each in _arrays(layer)}
        return LayerStates(end, arrays)

    def load(self, states: LayerStates, length: int) -> None:
        self._refuse_unfit(states, len(self.layers), length)
        self._start_at(
            states.num_positions, [layer.taken(states.arrays, number) for number, layer in enumerate(self.layers)]
        )

    def copyable_end(self, limit: int, length: int) -> int:
        end = min(limit, length) // BLOCK * BLOCK
        kept = self._kept.nearest(limit)
        return max(end if end >= self.boundary else 0, kept[0] if kept else 0)

    def _start_at(self, end: int, layers: list[LayerState]) -> None:
        self.boundary = end
        for layer, state in zip(self.layers, layers, strict=True):
            layer.start_at(state)

    def _fold(self, start: int, end: int) -> None:
        if self._steps is None or not self._recurrent.num_heads:
            for layer in self.layers:
                layer.state = layer.folded(layer.state, list(range(start, end)))
            return
        before = [layer.state for layer in self.layers]
        for layer in self.layers:
            layer.state = torch.empty_like(layer.state) if layer.state is layer.base else layer.state
        self._steps.fold(before, [layer.state for layer in self.layers], start, end)


def _arrays(layer: LayerState) -> list[tuple[str, np.ndarray]]:
    """Return the state's named arrays; 16-bit floats become integers of the same bits, and a CPU returns views."""
    inputs = layer.inputs.view(torch.int16) if layer.inputs.element_size() == 2 else layer.inputs
    return [("state", layer.state.cpu().numpy()), ("inputs", inputs.cpu().numpy())]
