"""The cache of a model that has recurrent layers beside those that attend (Qwen3-Next, Qwen3.5).

A recurrent layer has one state per sequence in place of keys and values per position. Each position changes it by a
step. The cache keeps the state behind the committed positions, and the steps since a boundary some way back. A row of
a draft tree starts at the state and takes the steps of its own path. So its bits follow from its path alone, and
nothing has to be undone where a draft fails.

States at boundaries are what checkpoints hold, what others with the same first tokens copy, and where a sequence goes
back to. They are never changed, so whoever has one shares its memory.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from swiftbatch.jobs.checkpoints.state_file import LayerStates
from swiftbatch.worker.caches.full import CacheShape, CacheSource, FullKVCache
from swiftbatch.worker.caches.recurrent_layer import LayerState, RecurrentLayer
from swiftbatch.worker.caches.room import FIRST_STEPS
from swiftbatch.worker.caches.room import NUM_STEPS as NUM_STEPS
from swiftbatch.worker.caches.stateful_cache import KeptStates, StatefulKVCache
from swiftbatch.worker.caches.windowed import WindowedKVCache
from swiftbatch.worker.kernels.recurrence import StepBuffers, are_known_states, folding_team
from swiftbatch.worker.kernels.sizes import BLOCK, TILE_ROWS
from swiftbatch.worker.model.recurrent_sizes import RecurrentShape


class RecurrentCache(StatefulKVCache):
    """Keys and values of the layers that attend, and the states of the others.

    The boundary stays at least one block behind the end, so that the last block can be rolled back.
    """

    def __init__(
        self, shape: CacheShape, recurrent: RecurrentShape, max_length: int, buffer: Tensor | None = None
    ) -> None:
        super().__init__(shape, max_length, buffer)
        self.boundary = 0
        self.num_steps = FIRST_STEPS if shape.device.type == "cpu" else NUM_STEPS  # a GPU's memory is planned at once
        layers = range(recurrent.num_layers)
        self.recurrent = [RecurrentLayer(recurrent, shape.dtype, shape.device, self.num_steps) for _ in layers]
        self._kept = KeptStates[list[LayerState]]()
        self._steps = self._step_buffers(recurrent)

    def _step_buffers(self, recurrent: RecurrentShape) -> StepBuffers | None:
        """The steps where the kernels move and fold them; None where they do not."""
        team = folding_team() if self.shape.device.type == "cpu" else None
        has_known = not recurrent.num_heads or are_known_states(recurrent.num_heads, recurrent.value_dim)
        return StepBuffers(team, [layer.steps() for layer in self.recurrent]) if team and has_known else None

    def reserve(self, num_steps: int) -> None:
        """Have room for so many steps behind the boundary. Raises ValueError for more than any sequence has."""
        if num_steps > NUM_STEPS:
            raise ValueError(f"found {num_steps} steps behind a boundary, expected {NUM_STEPS} at most")
        if num_steps <= self.num_steps:
            return
        self.num_steps = min(NUM_STEPS, -(-num_steps // TILE_ROWS) * TILE_ROWS)
        for layer in self.recurrent:
            layer.grow(self.num_steps)
        assert self.shape.recurrent is not None
        self._steps = self._step_buffers(self.shape.recurrent)

    def num_readable(self, most: int) -> int:
        """Return as many as there is room for, up to a boundary where that leaves out less than half of them."""
        room = min(most, self.num_steps - (self.length - self.boundary))
        to_boundary = (self.length + room) // BLOCK * BLOCK - self.length
        return to_boundary if 2 * to_boundary >= room else room

    def layer_steps(self) -> np.ndarray:
        """The addresses of the steps and the state of each layer, `[num_layers, 5]`."""
        return np.array([layer.addresses() for layer in self.recurrent], dtype=np.int64)

    def held(self) -> list[Tensor]:
        """The buffers at these addresses, which have to live as long as a call reads them."""
        return [each for layer in self.recurrent for each in layer.buffers()]

    def commit(self, path: list[int]) -> None:
        root = self.length - self.boundary
        super().commit(path)
        if path != list(range(len(path))):
            self._keep_path(root, path)
        self._take_steps(root)

    def advance(self, num_positions: int) -> None:
        start = self.length - self.boundary
        super().advance(num_positions)
        if start + num_positions <= self.num_steps:
            self._take_steps(start)
        else:  # positions that nobody has written: a length to measure forwards at
            self.boundary = self.length // BLOCK * BLOCK

    def roll_back(self, length: int) -> None:
        """Forget all positions from `length` on; where it lies in front of the boundary, those behind a kept state."""
        if length == self.length:
            return
        super().roll_back(length)
        self._kept.roll_back(length)
        if length and length >= self.boundary:
            for layer in self.recurrent:
                layer.state = layer.folded(layer.base, list(range(length - self.boundary)))
            return
        self.length = self.boundary = 0
        for layer in self.recurrent:
            layer.clear()
        if nearest := self._kept.nearest(length):
            self._start_at(*nearest)

    def clear(self) -> None:
        super().clear()
        for layer in self.recurrent:
            layer.clear()

    def states_at(self, end: int) -> LayerStates | None:
        """The states behind the first `end` positions: kept ones, or those of a boundary behind this cache's own."""
        kept = self._kept.at(end)
        layers = [layer.at(end - self.boundary) for layer in self.recurrent] if kept is None else kept
        arrays = {f"{part}.{number}": each for number, layer in enumerate(layers) for part, each in _arrays(layer)}
        return LayerStates(end, arrays)

    def set_states(self, states: LayerStates) -> None:
        self._refuse_unfit(states, len(self.recurrent))
        self._start_at(
            states.num_positions, [layer.taken(states.arrays, number) for number, layer in enumerate(self.recurrent)]
        )

    def copyable_end(self, limit: int) -> int:
        end = min(limit, self.length) // BLOCK * BLOCK
        kept = self._kept.nearest(limit)
        return max(end if end >= self.boundary else 0, kept[0] if kept else 0)

    def copy_from(self, source: CacheSource, end: int) -> None:
        super().copy_from(source, end)
        states = source.states_at(end)
        assert states is not None  # `copyable_end` has promised it
        self.set_states(states)

    def _start_at(self, end: int, layers: list[LayerState]) -> None:
        self.length = self.boundary = end
        for layer, state in zip(self.recurrent, layers, strict=True):
            layer.start_at(state)

    def _take_steps(self, start: int) -> None:
        """Bring the states to the end of what is committed, and the boundary near it."""
        self._fold(start, self.length - self.boundary)
        while self.length - self.boundary >= 2 * BLOCK:
            for layer in self.recurrent:
                layer.move_base(BLOCK)
            self.boundary += BLOCK
            if self._kept.wants(self.boundary):
                self._kept.keep(self.boundary, [layer.at(0) for layer in self.recurrent])

    def _keep_path(self, root: int, path: list[int]) -> None:
        """Move the steps of the nodes `path` next to their root's."""
        if self._steps is not None:
            self._steps.keep(root + 1, path)
            return
        for layer in self.recurrent:
            layer.keep_path(root, path)

    def _fold(self, start: int, end: int) -> None:
        """Bring the states behind some steps; those that others share stay as they are."""
        if self._steps is None or not self.shape.recurrent or not self.shape.recurrent.num_heads:
            for layer in self.recurrent:
                layer.state = layer.folded(layer.state, list(range(start, end)))
            return
        before = [layer.state for layer in self.recurrent]
        for layer in self.recurrent:
            layer.state = torch.empty_like(layer.state) if layer.state is layer.base else layer.state
        self._steps.fold(before, [layer.state for layer in self.recurrent], start, end)


def _arrays(layer: LayerState) -> list[tuple[str, np.ndarray]]:
    """A layer's part of `LayerStates`; 16-bit floats as their bits. On a CPU views."""
    inputs = layer.inputs.view(torch.int16) if layer.inputs.element_size() == 2 else layer.inputs
    return [("state", layer.state.cpu().numpy()), ("inputs", inputs.cpu().numpy())]


def new_cache_of(shape: CacheShape, max_length: int, buffer: Tensor | None = None) -> FullKVCache:
    """An empty cache on the device for a model of this shape; with a `buffer` for its keys and values."""
    if shape.recurrent is not None:
        return RecurrentCache(shape, shape.recurrent, max_length, buffer)
    if any(shape.windows) and buffer is None:
        return WindowedKVCache(shape, max_length)
    return FullKVCache(shape, max_length, buffer)
