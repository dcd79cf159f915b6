"""Recurrent states in the slots of a GPU worker: at the last two boundaries, with the steps after them.

A rejected draft therefore needs no undo, and the last block can be rolled back.
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

MOST_READ = MAX_TREE_NODES + 1  # a forward has room for as many steps as the largest tree


class StateSlots:
    """States and steps of all slots; accepted steps move within them."""

    followers: Sequence[StateSlots] = ()  # the same states on other GPUs

    def __init__(self, shape: CacheShape, sizes: RecurrentShape, num_slots: int) -> None:
        self.states = StateBuffers.empty(sizes, sizes.num_layers, num_slots, shape.dtype, MOST_READ, shape.device)
        self.num_before = sizes.conv_width - 1  # convolutions after a boundary read so many earlier inputs
        self._moves = torch.tensor([PADDING] * MAX_TREE_NODES, dtype=torch.int32, device=shape.device)
        self._upload = Upload(self._moves.view(-1))

    def of(self, rows: CacheRows) -> SlotStates:
        return SlotStates(self, rows)

    def move_steps(self, slot: int, root: int, path: Sequence[int]) -> None:
        """Move the steps of a tree's nodes `path` next to its root, entry `root`, without waiting."""
        moves = moves_of(slot, root, path)
        if not moves:
            return
        table = self._upload.buffer().reshape(self._moves.shape)
        table[:] = PADDING
        table[: len(moves)] = moves
        self._upload.send()
        move_steps(self.states, self._moves)


class SlotStates(StateStore[LayerStates]):
    """States of a slot at its last two boundaries, and the steps after them."""

    def __init__(self, slots: StateSlots, rows: CacheRows) -> None:
        super().__init__()
        self._slots, self._rows = slots, rows
        self._oldest = 0  # the slot's oldest states are at this boundary
        self._due: list[int] = []  # the next forward has the states of these boundaries

    def fold_to(self, boundary: int) -> None:
        """Note that a forward has rows after `boundary` and therefore stores the state at `boundary`."""
        if boundary > self.boundary:
            passed = range(self.boundary + BLOCK, boundary + 1, BLOCK)
            self._due += [each for each in passed if self._kept.wants(each)]
            self.boundary, self._oldest = boundary, max(self._oldest, boundary - BLOCK)

    def num_readable(self, length: int, most: int) -> int:
        return min(most, MOST_READ)

    def move(self, root: int, path: list[int]) -> None:
        for slots, rows in self._on_all_ranks():
            slots.move_steps(rows.slot, root, path)

    def advance(self, start: int, end: int) -> None:
        if end - self.boundary > BLOCK:  # true only in benchmarks of forwards, over unwritten positions
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
        for slots, own in self._on_all_ranks():
            for numbers in (slots.states.states, slots.states.steps):
                numbers[:, own.slot].zero_()

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
        for slots, own in self._on_all_ranks():
            for name, part, rows in self._parts_at(end, slots):
                if rows.numel():
                    own.from_host(rows, states.arrays[name][part])
        self.boundary = self._oldest = end

    def copyable_end(self, limit: int, length: int) -> int:
        kept = self._kept.nearest(limit)
        own = (each for each in (self.boundary, self.boundary - BLOCK) if each <= limit and self._has(each))
        return max(next(own, 0), kept[0] if kept else 0)

    def copy(self, theirs: StateStore[LayerStates] | None, end: int) -> bool:
        if not isinstance(theirs, SlotStates) or not theirs._has(end):
            return False
        for slots, _ in self._on_all_ranks():
            for (_, _, own), (_, _, other) in zip(
                self._parts_at(end, slots), theirs._parts_at(end, slots), strict=True
            ):
                own.copy_(other)
        self.boundary = self._oldest = end
        return True

    def _has(self, boundary: int) -> bool:
        return boundary > 0 and self._oldest <= boundary <= self.boundary <= boundary + BLOCK

    def _copied(self, end: int) -> LayerStates:
        arrays = self._empty_arrays()
        for name, part, rows in self._parts_at(end, self._slots):
            if rows.numel():
                arrays[name][part] = self._rows.to_host(rows)
        return LayerStates(end, arrays)

    def _empty_arrays(self) -> State:
        states = self._slots.states
        numbers = np.dtype(np.int16 if states.inputs.element_size() == 2 else np.float32)
        arrays: State = {}
        for layer in range(len(states.states)):
            arrays[f"state.{layer}"] = np.empty(states.states.shape[3:], dtype=np.float32)
            arrays[f"inputs.{layer}"] = np.empty((self._slots.num_before, states.inputs.shape[-1]), dtype=numbers)
        return arrays

    def _on_all_ranks(self) -> list[tuple[StateSlots, CacheRows]]:
        """Return the states of each GPU, with its rows."""
        return [*zip((self._slots, *self._slots.followers), self._rows.ranks or [self._rows], strict=True)]

    def _parts_at(self, end: int, slots: StateSlots) -> Iterator[tuple[str, slice, torch.Tensor]]:
        """Yield the parts of a boundary's states: an array's name, rows of it, and these rows on the device."""
        states, slot, number = slots.states, self._rows.slot, number_of_state(end)
        inputs = states.inputs.view(torch.int16) if states.inputs.element_size() == 2 else states.inputs
        for layer in range(len(states.states)):
            yield f"state.{layer}", slice(None), states.states[layer, slot, number]
            for part, own in _in_ring(end - self._slots.num_before, end, states.layout.ring):
                yield f"inputs.{layer}", part, inputs[layer, slot, own]


def _in_ring(start: int, end: int, ring: int) -> Iterator[tuple[slice, slice]]:
    """Yield contiguous pieces of a ring's entries: their indices, and their offsets in the ring."""
    place = start
    while place < end:
        stop = min(end, (place // ring + 1) * ring)
        yield slice(place - start, stop - start), slice(place % ring, place % ring + stop - place)
        place = stop
