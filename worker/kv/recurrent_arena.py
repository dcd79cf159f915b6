"""States of layers in the slots of a GPU worker, beside the pages of keys and values.

A sequence's states are those at its last two boundaries, with the steps of the positions behind: what a row reads, in
the order of its path. So a draft that fails leaves nothing to undo, and the last block can be taken back. States of
boundaries that others copy from, or that a sequence may go back to, are kept on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from swiftbatch.jobs.checkpoints.kv_segments import LayerStates, State
from swiftbatch.worker.kernels.cuda.cuda_graph import Upload
from swiftbatch.worker.kernels.cuda.cuda_recurrence import StateBuffers, move_steps, number_of_state
from swiftbatch.worker.kernels.cuda.kv_kernels import PADDING, moves_of
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kv.cache_rows import CacheRows, CacheShape
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES
from swiftbatch.worker.kv.recurrent_cache import StateStore
from swiftbatch.worker.model.architectures.recurrent_layers import RecurrentShape

MOST_READ = MAX_TREE_NODES + 1  # known tokens of one forward: as many steps as the largest tree has


class StateSlots:
    """States and steps of all slots, as much of them for each; accepted steps move within them."""

    def __init__(self, shape: CacheShape, sizes: RecurrentShape, num_slots: int) -> None:
        self.states = StateBuffers.empty(sizes, sizes.num_layers, num_slots, shape.dtype, MOST_READ, shape.device)
        self.num_before = sizes.conv_width - 1  # inputs in front of a boundary that the convolutions behind it read
        self._moves = torch.tensor([PADDING] * MAX_TREE_NODES, dtype=torch.int32, device=shape.device)
        self._upload = Upload(self._moves.view(-1))

    def of(self, rows: CacheRows) -> SlotStates:
        """The states of the slot of `rows`."""
        return SlotStates(self, rows)

    def move_steps(self, slot: int, root: int, path: Sequence[int]) -> None:
        """Bring the steps of the nodes `path` of a tree whose root is entry `root` behind it, without a wait."""
        moves = moves_of(slot, root, path)
        if not moves:
            return
        table = self._upload.buffer().reshape(self._moves.shape)
        table[:] = PADDING
        table[: len(moves)] = moves
        self._upload.send()
        move_steps(self.states, self._moves)


class SlotStates(StateStore[LayerStates]):
    """States of a slot at its last two boundaries, and the steps behind them.

    A forward folds steps into the state of the boundary that its rows are behind; `fold_to` takes note of it.
    """

    def __init__(self, slots: StateSlots, rows: CacheRows) -> None:
        """Take the states of the slot of `rows`, which know the way to the host."""
        super().__init__()
        self._slots, self._rows = slots, rows
        self._oldest = 0  # boundary of the states that the slot has
        self._due: list[int] = []  # boundaries whose states are to be kept, once a forward has them

    def fold_to(self, boundary: int) -> None:
        """Take note of a forward with rows behind a boundary: the slot has its state from then on."""
        if boundary > self.boundary:
            passed = range(self.boundary + BLOCK, boundary + 1, BLOCK)
            self._due += [each for each in passed if self._kept.wants(each)]
            self.boundary, self._oldest = boundary, max(self._oldest, boundary - BLOCK)

    def num_readable(self, length: int, most: int) -> int:
        return min(most, MOST_READ)

    def move(self, root: int, path: list[int]) -> None:
        self._slots.move_steps(self._rows.slot, root, path)

    def advance(self, start: int, end: int) -> None:
        if end - self.boundary > BLOCK:  # positions that nobody has written: a length to measure forwards at
            self.boundary = self._oldest = end // BLOCK * BLOCK
        for boundary in self._due:
            if self._has(boundary):
                self._kept.keep(boundary, self._copied(boundary))
        self._due.clear()

    def cut(self, length: int) -> int:
        self._kept.roll_back(length)
        if length >= self._oldest:
            self.boundary = min(self.boundary, length // BLOCK * BLOCK)
            return length
        self.boundary = self._oldest = 0
        if (nearest := self._kept.nearest(length)) is not None:
            self.load(nearest[1], length)
        return self.boundary

    def clear(self) -> None:
        for numbers in (self._slots.states.states, self._slots.states.steps):
            numbers[:, self._rows.slot].zero_()

    def at(self, end: int) -> LayerStates:
        return self._kept.at(end) or self._copied(end)

    def load(self, states: LayerStates, length: int) -> None:
        self._refuse_unfit(states, len(self._slots.states.states), length)
        end = states.num_positions
        for name, like in self._empty_arrays().items():
            found = states.arrays.get(name, np.empty(0, dtype=np.bool_))
            if (found.dtype, found.shape) != (like.dtype, like.shape):
                raise ValueError(
                    f"found {found.dtype} {list(found.shape)} as a part of a layer's state, expected {like.dtype} "
                    f"{list(like.shape)}"
                )
        for name, part, rows in self._parts_at(end):
            if rows.numel():
                self._rows.from_host(rows, states.arrays[name][part])
        self.boundary = self._oldest = end

    def copyable_end(self, limit: int, length: int) -> int:
        kept = self._kept.nearest(limit)
        own = (each for each in (self.boundary, self.boundary - BLOCK) if each <= limit and self._has(each))
        return max(next(own, 0), kept[0] if kept else 0)

    def copy(self, theirs: StateStore[LayerStates] | None, end: int) -> bool:
        if not isinstance(theirs, SlotStates) or not theirs._has(end):
            return False
        for (_, _, own), (_, _, other) in zip(self._parts_at(end), theirs._parts_at(end), strict=True):
            own.copy_(other)
        self.boundary = self._oldest = end
        return True

    def _has(self, boundary: int) -> bool:
        """Tell whether the slot has the state at a boundary."""
        return boundary > 0 and self._oldest <= boundary <= self.boundary <= boundary + BLOCK

    def _copied(self, end: int) -> LayerStates:
        """The states of a boundary that the slot has, on the host."""
        arrays = self._empty_arrays()
        for name, part, rows in self._parts_at(end):
            if rows.numel():
                arrays[name][part] = self._rows.to_host(rows)
        return LayerStates(end, arrays)

    def _empty_arrays(self) -> State:
        """Arrays of the states of all layers at a boundary; 16-bit floats are as their bits."""
        states = self._slots.states
        numbers = np.dtype(np.int16 if states.inputs.element_size() == 2 else np.float32)
        arrays: State = {}
        for layer in range(len(states.states)):
            arrays[f"state.{layer}"] = np.empty(states.states.shape[3:], dtype=np.float32)
            arrays[f"inputs.{layer}"] = np.empty((self._slots.num_before, states.inputs.shape[-1]), dtype=numbers)
        return arrays

    def _parts_at(self, end: int) -> Iterator[tuple[str, slice, torch.Tensor]]:
        """Yield the parts of a boundary's states: the names of arrays, which of their rows, and these on the device.

        Inputs lie in a ring, and so in one part or in two.
        """
        states, slot, number = self._slots.states, self._rows.slot, number_of_state(end)
        inputs = states.inputs.view(torch.int16) if states.inputs.element_size() == 2 else states.inputs
        for layer in range(len(states.states)):
            yield f"state.{layer}", slice(None), states.states[layer, slot, number]
            for part, own in _in_ring(end - self._slots.num_before, end, states.layout.ring):
                yield f"inputs.{layer}", part, inputs[layer, slot, own]


def _in_ring(start: int, end: int, ring: int) -> Iterator[tuple[slice, slice]]:
    """Yield entries `[start, end)` by parts that lie side by side in a ring: which of them, and where they lie."""
    place = start
    while place < end:
        stop = min(end, (place // ring + 1) * ring)
        yield slice(place - start, stop - start), slice(place % ring, place % ring + stop - place)
        place = stop
