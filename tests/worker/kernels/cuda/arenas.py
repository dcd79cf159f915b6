"""Sequences in an arena for the tests of the CUDA kernels: NaN wherever no row may look."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swiftbatch.worker.caches.full import FullKVCache
from swiftbatch.worker.drawing.tree import DraftTree
from swiftbatch.worker.kernels.cuda.attend import AttentionShape
from swiftbatch.worker.kernels.cuda.cuda_row_table import BLOCK, NUM_ROWS, CudaRowTable, TableLayout
from swiftbatch.worker.target.tiles import SequenceRows, tree_rows
from tests.worker.kernels.kernel_parts import Shape, cache_shape, noise, random_tree

CAPACITY = 1024
NUM_SPLITS = 3
NAN = float("nan")

Placed = tuple[SequenceRows, int]  # rows and their slot


@dataclass(frozen=True)
class Arena:
    """`buffer [num_layers, 2, num_slots, num_kv_heads, capacity, head_dim]`, and the caches that are its slots."""

    shape: Shape
    buffer: Tensor
    caches: list[FullKVCache]

    @property
    def layout(self) -> TableLayout:
        shape = self.shape
        attention = AttentionShape(shape.num_kv_heads, shape.group, shape.head_dim, NUM_SPLITS, shape.dtype)
        return TableLayout(len(self.caches), CAPACITY, attention.rows_per_group, CAPACITY, shape.vocab)

    def table(self, sequences: Sequence[Placed]) -> CudaRowTable[Tensor]:
        """Of the rows; entries of tails that are not real lead to NaN."""
        buffer = np.full(self.layout.size, -1, dtype=np.int32)
        self.layout.fill(buffer, sequences)
        table = self.layout.table(torch.from_numpy(buffer))
        table.tail_slots[torch.arange(BLOCK) >= table.rows[:, 2, None]] = CAPACITY - 1
        return table

    def copy(self) -> Arena:
        return arena_of(self.shape, self.buffer.clone(), [cache.length for cache in self.caches])


def arena_of(shape: Shape, buffer: Tensor, lengths: Sequence[int]) -> Arena:
    caches = []
    for slot, length in enumerate(lengths):
        caches.append(FullKVCache(cache_shape(shape), 0, buffer[:, :, slot]))
        caches[-1].advance(length)
    return Arena(shape, buffer, caches)


def random_arena(shape: Shape, lengths: Sequence[int]) -> Arena:
    """A slot for each length, with so many positions of noise; NaN behind them."""
    size = (2, 2, len(lengths), shape.num_kv_heads, CAPACITY, shape.head_dim)
    arena = arena_of(shape, torch.full(size, NAN, dtype=shape.dtype), lengths)
    for slot, length in enumerate(lengths):
        arena.buffer[:, :, slot, :, :length] = noise(shape)[..., slot * 7 : slot * 7 + length, :]
    return arena


def random_rows(numbers: random.Random, arena: Arena, sizes: Sequence[int]) -> list[Placed]:
    """A tree of up to so many rows for each of the first slots."""
    sequences = []
    for slot, size in enumerate(sizes):
        cache, vocab = arena.caches[slot], arena.shape.vocab
        tree = random_tree(numbers, size - 1, cache.length, vocab) if size > 1 else DraftTree()
        sequences.append((tree_rows(cache, numbers.randrange(vocab), tree), slot))
    return sequences


def padded(rows: Tensor) -> Tensor:
    """Rows at the beginning of a forward's, NaN in the others."""
    whole = torch.full((NUM_ROWS, *rows.shape[1:]), NAN, dtype=rows.dtype)
    whole[: len(rows)] = rows
    return whole
