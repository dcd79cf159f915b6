"""The state of one recurrent layer for one sequence, and its last positions' steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swiftbatch.jobs.checkpoints.state_file import State
from swiftbatch.worker.kernels.recurrence import are_known_states, folding_team, native_fold
from swiftbatch.worker.model.recurrent_sizes import RecurrentShape


@dataclass(frozen=True)
class LayerState:
    """A layer at a boundary: its state, and the inputs in front that its convolution still reads. Never changed."""

    state: Tensor  # [num_heads, key_dim, value_dim] float32
    inputs: Tensor  # [conv_width - 1, num_channels]


class RecurrentLayer:
    """One layer's state, and its steps by their positions behind the boundary.

    `state [num_heads, key_dim, value_dim] float32` is behind the committed positions, `base` at the boundary.
    A step turns a state into `decay * state + key (x) update`, with one decay for a head, or one for each of its rows.
    """

    def __init__(self, shape: RecurrentShape, dtype: torch.dtype, device: torch.device, num_steps: int) -> None:
        is_known = device.type == "cpu" and are_known_states(shape.num_heads, shape.value_dim)
        self._team = folding_team() if is_known else None
        self._group = shape.num_heads // max(1, shape.num_key_heads)
        self._num_before = shape.conv_width - 1  # inputs in front of the boundary
        state = (shape.num_heads, shape.key_dim, shape.value_dim)
        self.state = self.base = torch.zeros(state, device=device)
        self.inputs = torch.zeros(self._num_before + num_steps, shape.num_channels, dtype=dtype, device=device)
        self.keys = torch.zeros(num_steps, shape.num_key_heads, shape.key_dim, device=device)
        self.updates = torch.zeros(num_steps, shape.num_heads, shape.value_dim, device=device)
        self.decays = torch.zeros(num_steps, shape.num_heads, shape.num_decays, device=device)

    def grow(self, num_steps: int) -> None:
        """Make room for so many steps behind the boundary."""
        more = num_steps - len(self.keys)
        names = ("inputs", "keys", "updates", "decays")
        for name, rows in zip(names, self.buffers()[:-1], strict=True):
            setattr(self, name, torch.cat([rows, rows.new_zeros(more, *rows.shape[1:])]))

    def steps(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The steps behind the boundary, as `StepBuffers` takes them."""
        return self.inputs[self._num_before :], self.keys, self.updates, self.decays

    def addresses(self) -> tuple[int, int, int, int, int]:
        """The addresses of inputs (those in front of the boundary first), steps and state."""
        inputs, keys, updates, decays, state = (each.data_ptr() for each in self.buffers())
        return inputs, keys, updates, decays, state

    def buffers(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """All that a forward reads or writes."""
        return self.inputs, self.keys, self.updates, self.decays, self.state

    def convolved(self, steps: Tensor) -> Tensor:
        """The inputs that the convolution of some steps reads: `steps [num_rows, conv_width]`, from -3 on."""
        return self.inputs[steps + self._num_before]

    def write_inputs(self, first: int, inputs: Tensor) -> None:
        """Keep the inputs of consecutive steps, `[num_rows, num_channels]`."""
        start = first + self._num_before
        self.inputs[start : start + len(inputs)] = inputs

    def write(self, steps: list[int], keys: Tensor, updates: Tensor, decays: Tensor) -> None:
        """Keep steps: `[n, num_key_heads, key_dim]`, `[n, num_heads, value_dim]`, decays, all float32."""
        self.keys[steps], self.updates[steps], self.decays[steps] = keys, updates, decays

    def heads_of(self, keys: Tensor) -> Tensor:
        """Keys of the value heads, `[num_heads, key_dim]`."""
        return keys.repeat_interleave(self._group, dim=0)

    def folded(self, state: Tensor, steps: list[int]) -> Tensor:
        """A state behind some more steps, in memory of its own if there are any."""
        if steps and self._team is not None:
            return native_fold(self._team, state, self.keys[steps], self.updates[steps], self.decays[steps])
        for step in steps:
            state = state * self.decays[step][:, :, None]
            state = state + self.heads_of(self.keys[step])[:, :, None] * self.updates[step][:, None]
        return state

    def keep_path(self, root: int, path: list[int]) -> None:
        """Move the steps of the nodes `path` next to their root's."""
        source, target = [root + 1 + node for node in path], list(range(root + 1, root + 1 + len(path)))
        for rows in self.steps():
            rows[target] = rows[source]

    def move_base(self, num_steps: int) -> None:
        """Set the boundary so many steps on."""
        self.base = self.folded(self.base, list(range(num_steps)))
        for rows in (self.inputs, self.keys, self.updates, self.decays):
            rows[: len(rows) - num_steps] = rows[num_steps:].clone()

    def at(self, num_steps: int) -> LayerState:
        """The layer so many steps behind the boundary."""
        inputs = self.inputs[num_steps : num_steps + self._num_before].clone()
        return LayerState(self.folded(self.base, list(range(num_steps))), inputs)

    def start_at(self, state: LayerState) -> None:
        """Be at a boundary, where no step is behind it."""
        self.state = self.base = state.state
        self.inputs[: self._num_before] = state.inputs

    def taken(self, arrays: State, number: int) -> LayerState:
        """The layer's part of what a checkpoint holds. Raises ValueError where it does not fit."""
        expected = {"state": self.base, "inputs": self.inputs[: self._num_before]}
        found = {name: _tensor(arrays.get(f"{name}.{number}"), like) for name, like in expected.items()}
        return LayerState(**found)

    def clear(self) -> None:
        """Set the state in front of all positions."""
        self.state = self.base = torch.zeros_like(self.base)
        self.inputs.zero_()


def _tensor(array: np.ndarray | None, like: Tensor) -> Tensor:
    """An array as a tensor of this shape and dtype, on its device. Raises ValueError for another one."""
    numbers = np.dtype(np.int16 if like.element_size() == 2 else np.float32)
    if array is None or (array.dtype, array.shape) != (numbers, tuple(like.shape)):
        found = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
        raise ValueError(f"found {found} as a part of a layer's state, expected {numbers} {list(like.shape)}")
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(like.dtype).to(like.device)
