"""Sequences in an arena with NaN wherever no row may look."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from swiftbatch.worker.forward.tile_packing import SequenceRows, tree_rows
from swiftbatch.worker.kernels.cuda.cuda_row_table import CudaRowTable, PageTable, TableLayout
from swiftbatch.worker.kernels.cuda.tree_attention import AttentionShape
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, NUM_ROWS
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree
from tests.worker.kernels.kernel_parts import Shape, cache_shape, noise, random_tree

CAPACITY = 1024
NAN = float("nan")


def normal(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


Placed = tuple[SequenceRows, int]  # rows and their slot


@dataclass(frozen=True)
class Arena:
    """`buffer [num_layers, 2, num_slots, num_kv_heads, capacity, head_dim]`, and its slots' caches."""

    shape: Shape
    buffer: Tensor
    caches: list[FullKVCache]

    @property
    def layout(self) -> TableLayout:
        shape = self.shape
        attention = AttentionShape(shape.num_kv_heads, shape.group, shape.head_dim, shape.dtype)
        return TableLayout(len(self.caches), CAPACITY, attention.rows_per_group, CAPACITY, shape.vocab)

    def table(self, sequences: Sequence[Placed], pages: PageTable | None = None) -> CudaRowTable[Tensor]:
        """Unused tail entries lead to NaN."""
        layout, own = self.layout, [[0]] * len(sequences)
        if pages is not None:
            layout = replace(layout, page=pages.page)
            own = [pages.numbers[slot].tolist() for _, slot in sequences]
        buffer = np.full(layout.size, -1, dtype=np.int32)
        layout.fill(buffer, sequences, own)
        table = layout.table(torch.from_numpy(buffer))
        table.tail_slots[torch.arange(BLOCK) >= table.rows[:, 2, None]] = CAPACITY - 1
        return table

    def in_pages(self, page: int) -> tuple[Tensor, PageTable]:
        """Put all slots into shuffled pages `[num_layers, 2, num_slots, num_kv_heads, entries, head_dim]` with NaN
        between them.

        Every slot sees the whole pool.
        """
        num_slots, most = len(self.caches), CAPACITY // page
        numbers = torch.randperm(2 * num_slots * most, generator=torch.Generator().manual_seed(page))
        numbers = numbers[: num_slots * most].view(num_slots, most).int()
        size = (*self.buffer.shape[:2], self.shape.num_kv_heads, 2 * num_slots * CAPACITY, self.shape.head_dim)
        pool = torch.full(size, NAN, dtype=self.shape.dtype)
        for slot, own in enumerate(numbers.tolist()):
            for number, place in enumerate(own):
                entries = slice(number * page, (number + 1) * page)
                pool[..., place * page : (place + 1) * page, :] = self.buffer[:, :, slot, :, entries]
        return pool[:, :, None].expand(-1, -1, num_slots, -1, -1, -1), PageTable(numbers, page)

    def copy(self) -> Arena:
        return arena_of(self.shape, self.buffer.clone(), [cache.length for cache in self.caches])


def arena_of(shape: Shape, buffer: Tensor, lengths: Sequence[int]) -> Arena:
    caches = []
    for slot, length in enumerate(lengths):
        caches.append(FullKVCache(cache_shape(shape), 0, buffer[:, :, slot]))
        caches[-1].advance(length)
    return Arena(shape, buffer, caches)


def random_arena(shape: Shape, lengths: Sequence[int]) -> Arena:
    size = (2, cache_shape(shape).num_parts, len(lengths), shape.num_kv_heads, CAPACITY, shape.head_dim)
    arena = arena_of(shape, torch.full(size, NAN, dtype=shape.dtype), lengths)
    for slot, length in enumerate(lengths):
        arena.buffer[:, :, slot, :, :length] = noise(shape)[..., slot * 7 : slot * 7 + length, :]
    return arena


def random_rows(numbers: random.Random, arena: Arena, sizes: Sequence[int]) -> list[Placed]:
    """Make trees of at most these sizes."""
    sequences = []
    for slot, size in enumerate(sizes):
        cache, vocab = arena.caches[slot], arena.shape.vocab
        tree = random_tree(numbers, size - 1, cache.length, vocab) if size > 1 else DraftTree()
        sequences.append((tree_rows(cache, numbers.randrange(vocab), tree), slot))
    return sequences


def padded(rows: Tensor) -> Tensor:
    whole = torch.full((NUM_ROWS, *rows.shape[1:]), NAN, dtype=rows.dtype)
    whole[: len(rows)] = rows
    return whole
