"""Partial caches of a drafter on a GPU in one buffer, with their biases and means."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.kernels.cuda.cuda_graph import Capture, Upload, capture
from swiftbatch.worker.kernels.cuda.kv_kernels import (
    PADDING,
    Move,
    average_chunks,
    gather_entries,
    gather_range,
    move_rows,
    moves_of,
)
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES, KVRoomError
from swiftbatch.worker.kv.slot_arena import Place, SlotBuffer
from swiftbatch.worker.kv.slot_leases import SlotLease
from swiftbatch.worker.kv.sparse_cache import Entries, SparseCacheFactory
from swiftbatch.worker.sampling.sequence import Sequence


class RowMover:
    """Moves rows of an arena's buffer; captures its CUDA graph at the start, before other threads copy."""

    def __init__(self, buffer: torch.Tensor, capture: Capture = capture) -> None:
        """Move rows of `buffer [num_layers, 2, num_slots, num_kv_heads, capacity, head_dim]`."""
        moves = self._moves = torch.tensor([PADDING] * MAX_TREE_NODES, dtype=torch.int32, device=buffer.device)
        self._upload = Upload(moves.view(-1))
        self._graph = capture(lambda: move_rows(buffer, moves), buffer.device)
        self._waiting: list[Move] | None = None  # moves to make together; None: make each at once

    def __call__(self, slot: int, root: int, path: Many[int], place: Place | None = None) -> None:
        """Move a tree's nodes `path` next to entry `root` of a slot."""
        moves = moves_of(slot, root, path)
        if place is not None:
            moves = [(0, place(source), place(target)) for _, source, target in moves]
        if self._waiting is None:
            self._move(moves)
        else:
            self._waiting += moves

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Collect moves, and make them all at once on exit."""
        self._waiting = moves = list[Move]()
        try:
            yield
        finally:
            self._waiting = None
            self._move(moves)

    def _move(self, moves: list[Move]) -> None:
        for start in range(0, len(moves), len(self._moves)):
            part = moves[start : start + len(self._moves)]
            table = self._upload.buffer().reshape(self._moves.shape)
            table[:] = PADDING
            table[: len(part)] = part
            self._upload.send()
            self._graph.replay()


class SparseArena(SlotBuffer):
    """Slots of partial caches: entries, `bias [num_slots, capacity]`, and means of keys and values.

    `means` has the shape of `buffer`, with two parts, and with `num_chunks` in place of `capacity`.
    """

    def __init__(self, shape: CacheShape, num_slots: int, capacity: int, num_chunks: int) -> None:
        super().__init__(replace(shape, kv_dtype=None), range(shape.num_layers), num_slots, capacity)
        self.num_chunks = num_chunks
        size = (shape.num_layers, 2, num_slots, shape.num_kv_heads, num_chunks, shape.head_dim)
        self.means = torch.empty(size, dtype=shape.dtype, device=shape.device)
        self.bias = torch.zeros(num_slots, capacity, device=shape.device)
        self.move_rows: RowMover = RowMover(self.buffer)

    def new_entries(self, shape: CacheShape, capacity: int) -> SlotEntries:
        """Return entries in a slot, which is free again once they are gone."""
        if capacity > self.capacity:
            raise KVRoomError(f"a partial cache of {capacity:,} entries: a slot has {self.capacity:,}")
        return SlotEntries(self, self.leases.take(f"no slot for a partial cache: all {self.num_slots} are taken"))


class SlotEntries(Entries):
    """One slot of a `SparseArena`; one kernel copies all layers."""

    def __init__(self, arena: SparseArena, lease: SlotLease) -> None:
        super().__init__(arena.shape, arena.capacity, arena.buffer[:, :, lease.slot])
        self.arena, self._lease = arena, lease

    @property
    def slot(self) -> int:
        return self._lease.slot

    def new_means(self, part: int, num_chunks: int) -> torch.Tensor:
        if num_chunks > self.arena.num_chunks:
            raise KVRoomError(f"means of {num_chunks:,} chunks: a slot has {self.arena.num_chunks:,}")
        return self.arena.means[:, part, self.slot, :, :num_chunks]

    def copy(self, full: FullKVCache, positions: slice, first_entry: int) -> None:
        out = self._at(first_entry, positions.stop - positions.start)
        gather_range(full.rows.buffer, positions.start, out, full.page_table)

    def gather(self, full: FullKVCache, positions: torch.Tensor, first_entry: int) -> None:
        out = self._at(first_entry, positions.shape[2])
        gather_entries(full.rows.buffer, _numbers(positions), out, full.page_table)

    def gather_values(self, means: torch.Tensor, chunks: torch.Tensor, first_entry: int) -> None:
        if self.arena.shape.num_parts == 2:  # values may be the beginning of their keys
            gather_entries(means[:, None], _numbers(chunks), self._at(first_entry, chunks.shape[2])[:, 1:])

    def average(self, full: FullKVCache, part: int, positions: slice, means: torch.Tensor) -> None:
        chunk_size = (positions.stop - positions.start) // means.shape[2]
        rows = full.rows.buffer[:, min(part, full.shape.num_parts - 1)]
        average_chunks(rows, positions.start, chunk_size, means, full.page_table)

    def replace(self, full: FullKVCache, positions: slice, entries: torch.Tensor) -> None:
        self.buffer[:, :, :, entries] = full.shape.numbers(full.rows.between(positions))

    def keep_path(self, root: int, path: list[int]) -> int:
        self.arena.move_rows(self.slot, root, path)
        return root + 1 + len(path)

    def set_bias(self, bias: np.ndarray | None) -> None:
        super().set_bias(bias)
        row = self.arena.bias[self.slot]
        row.zero_()
        if bias is not None:
            host = torch.from_numpy(bias)
            host = host.pin_memory() if row.device.type == "cuda" else host  # so that the copy does not block
            row[: len(bias)].copy_(host, non_blocking=True)

    def _at(self, first_entry: int, num_entries: int) -> torch.Tensor:
        return self.buffer[:, :, :, first_entry : first_entry + num_entries]


class _Asked(Entries):
    """Entries on a device without memory; records the largest number of chunk means that a cache asks for."""

    num_chunks = 0

    def new_means(self, part: int, num_chunks: int) -> torch.Tensor:
        self.num_chunks = max(self.num_chunks, num_chunks)
        return super().new_means(part, num_chunks)


def arena_for(
    new_cache: SparseCacheFactory, budget: int, shape: CacheShape, num_slots: int, longest_job: int
) -> SparseArena:
    """Return slots for the partial caches of jobs of up to `longest_job` positions."""
    counts = (shape.num_layers, shape.num_kv_heads, shape.head_dim)
    nowhere = CacheShape(*counts, shape.dtype, torch.device("meta"), num_parts=shape.num_parts)
    longest = Sequence("longest", [0], SamplingParams(max_tokens=max(1, longest_job - 1)), 1)
    cache = new_cache(nowhere, min(budget, longest.max_length), longest, _Asked)
    asked = cache.entries
    assert isinstance(asked, _Asked)
    return SparseArena(shape, num_slots, asked.buffer.shape[-2], asked.num_chunks)


def _numbers(chosen: torch.Tensor) -> torch.Tensor:
    return chosen.to(torch.int32).contiguous()
