"""The caches of a GPU worker whose model has layers with a state: pages of keys and values, and a slot of states.

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
from swiftbatch.worker.kv.full_cache import CacheShape, CacheSource
from swiftbatch.worker.kv.host_copies import Staging
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES, PoolSize
from swiftbatch.worker.kv.paged_arena import PagedArena, PagedKVCache, PageLease, SlotLease
from swiftbatch.worker.kv.recurrent_cache import KeptStates, StatefulKVCache

MOST_READ = MAX_TREE_NODES + 1  # known tokens of one forward: as many steps as the largest tree has


class StateArena(PagedArena):
    """A `PagedArena` with states and steps beside its pages, as much of them for each slot."""

    states: StateBuffers

    def __init__(
        self, shape: CacheShape, num_slots: int, max_length: int, pool: PoolSize, staging: Staging | None = None
    ) -> None:
        """Make an arena for a `shape` with states."""
        super().__init__(shape, num_slots, max_length, pool, staging)
        sizes = shape.recurrent
        assert sizes is not None
        self.states = StateBuffers.empty(sizes, sizes.num_layers, num_slots, shape.dtype, MOST_READ, shape.device)
        self._moves = torch.tensor([PADDING] * MAX_TREE_NODES, dtype=torch.int32, device=shape.device)
        self._upload = Upload(self._moves.view(-1))

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

    def _cache(self, lease: SlotLease, max_length: int) -> StateSlotCache:
        assert isinstance(lease, PageLease)
        return StateSlotCache(self, lease, max_length, self._staging)


class StateSlotCache(StatefulKVCache, PagedKVCache):
    """A `FullKVCache` with states: `boundary` is that of the newest one.

    A forward folds steps into the state of the boundary that its rows are behind; `fold_to` takes note of it.
    """

    _arena: StateArena

    def __init__(self, arena: StateArena, lease: PageLease, max_length: int, staging: Staging | None) -> None:
        super().__init__(arena, lease, max_length, staging)
        self.boundary = self._oldest = 0  # of the states that the slot has
        self._kept = KeptStates[LayerStates]()
        self._due: list[int] = []  # boundaries whose states are to be kept, once a forward has them

    def fold_to(self, boundary: int) -> None:
        """Take note of a forward with rows behind a boundary: the slot has its state from then on."""
        if boundary > self.boundary:
            passed = range(self.boundary + BLOCK, boundary + 1, BLOCK)
            self._due += [each for each in passed if self._kept.wants(each)]
            self.boundary, self._oldest = boundary, max(self._oldest, boundary - BLOCK)

    def num_readable(self, most: int) -> int:
        return min(most, MOST_READ)

    def commit(self, path: list[int]) -> None:
        self._arena.move_steps(self.slot, self.length, path)
        super().commit(path)

    def advance(self, num_positions: int) -> None:
        super().advance(num_positions)
        if self.length - self.boundary > BLOCK:  # positions that nobody has written: a length to measure forwards at
            self.boundary = self._oldest = self.length // BLOCK * BLOCK
        for boundary in self._due:
            if self._has(boundary):
                self._kept.keep(boundary, self._copied(boundary))
        self._due.clear()

    def roll_back(self, length: int) -> None:
        """Forget all positions from `length` on; where no state is near in front of it, those behind a kept one.

        Where the last page has to be copied and none is free for that, its positions are forgotten as well.
        """
        if length == self.length:
            return
        super().roll_back(length)
        self._kept.roll_back(self.length)
        while self.length < self._oldest:
            if (nearest := self._kept.nearest(self.length)) is not None:
                self.set_states(nearest[1])  # finds no free page either, perhaps
            else:
                super().roll_back(0)
                self._oldest = 0
        self.boundary = min(self.boundary, self.length // BLOCK * BLOCK)

    def clear(self) -> None:
        super().clear()
        for numbers in (self._arena.states.states, self._arena.states.steps):
            numbers[:, self.slot].zero_()

    def states_at(self, end: int) -> LayerStates | None:
        return self._kept.at(end) or self._copied(end)

    def set_states(self, states: LayerStates) -> None:
        self._refuse_unfit(states, len(self._arena.states.states))
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
                self._copy_in(rows, states.arrays[name][part])
        super().roll_back(end)
        self.boundary = self._oldest = end

    def copyable_end(self, limit: int) -> int:
        kept = self._kept.nearest(limit)
        own = (each for each in (self.boundary, self.boundary - BLOCK) if each <= limit and self._has(each))
        return max(next(own, 0), kept[0] if kept else 0)

    def copy_from(self, source: CacheSource, end: int) -> None:
        """Copy as `PagedKVCache` does; states of another slot, where that has them still, stay on the device."""
        super().copy_from(source, end)
        if isinstance(source, StateSlotCache) and source._has(end):
            for (_, _, own), (_, _, theirs) in zip(self._parts_at(end), source._parts_at(end), strict=True):
                own.copy_(theirs)
            self.boundary = self._oldest = end
        else:
            states = source.states_at(end)
            assert states is not None  # `copyable_end` has promised it
            self.set_states(states)
            self.num_copied = end

    def _has(self, boundary: int) -> bool:
        """Tell whether the slot has the state at a boundary."""
        return boundary > 0 and self._oldest <= boundary <= self.boundary <= boundary + BLOCK

    def _copied(self, end: int) -> LayerStates:
        """The states of a boundary that the slot has, on the host."""
        arrays = self._empty_arrays()
        for name, part, rows in self._parts_at(end):
            if rows.numel():
                arrays[name][part] = self._copied_out(rows)
        return LayerStates(end, arrays)

    def _empty_arrays(self) -> State:
        """Arrays of the states of all layers at a boundary; 16-bit floats are as their bits."""
        states = self._arena.states
        numbers = np.dtype(np.int16 if states.inputs.element_size() == 2 else np.float32)
        arrays: State = {}
        for layer in range(len(states.states)):
            arrays[f"state.{layer}"] = np.empty(states.states.shape[3:], dtype=np.float32)
            arrays[f"inputs.{layer}"] = np.empty((self._num_before, states.inputs.shape[-1]), dtype=numbers)
        return arrays

    def _parts_at(self, end: int) -> Iterator[tuple[str, slice, torch.Tensor]]:
        """Yield the parts of a boundary's states: the names of arrays, which of their rows, and these on the device.

        Inputs lie in a ring, and so in one part or in two.
        """
        states, slot, number = self._arena.states, self.slot, number_of_state(end)
        inputs = states.inputs.view(torch.int16) if states.inputs.element_size() == 2 else states.inputs
        for layer in range(len(states.states)):
            yield f"state.{layer}", slice(None), states.states[layer, slot, number]
            for part, own in _in_ring(end - self._num_before, end, states.layout.ring):
                yield f"inputs.{layer}", part, inputs[layer, slot, own]

    @property
    def _num_before(self) -> int:
        """Inputs in front of a boundary that the convolutions behind it read."""
        sizes = self.shape.recurrent
        assert sizes is not None
        return sizes.conv_width - 1


def _in_ring(start: int, end: int, ring: int) -> Iterator[tuple[slice, slice]]:
    """Yield entries `[start, end)` by parts that lie side by side in a ring: which of them, and where they lie."""
    place = start
    while place < end:
        stop = min(end, (place // ring + 1) * ring)
        yield slice(place - start, stop - start), slice(place % ring, place % ring + stop - place)
        place = stop
