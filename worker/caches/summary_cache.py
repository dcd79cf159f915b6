"""Summarised key-value cache: the chunks that matter most whole, every other chunk as one entry, the newest positions.

Where attention is spread over the whole text, the most important positions alone are a poor guess of it: most of the
weight lies in what is left out. Here nothing is left out. A chunk's entry has the key of its middle position, the mean
of its values, and the logarithm of its size added to its score: it weighs what the positions it stands for weigh.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch

from swiftbatch.worker.caches.full_cache import CacheShape, FullKVCache
from swiftbatch.worker.caches.partial_cache import NUM_PINNED, Entries, NewEntries, PartialCache, Queries, capacity_for
from swiftbatch.worker.drawing.sequence import Sequence

CHUNK_SIZE = 32
NUM_RECENT = 256  # newest positions, whole whatever their importance
PERIOD = 256  # positions from one build to the next
PARTS = {"keys": 0, "values": 1}


class SummaryKVCache(PartialCache):
    """Pinned positions, chosen chunks, summaries of the others, newest positions. It is built at fixed positions."""

    def __init__(
        self, shape: CacheShape, budget: int, sequence: Sequence, new_entries: NewEntries = Entries, /
    ) -> None:
        """`budget` counts the entries that hold whole positions; there is one more for every chunk left out."""
        max_length = sequence.max_length
        self._num_chosen = _num_chosen(budget)
        self._first_build = NUM_PINNED + NUM_RECENT + 2 * self._num_chosen * CHUNK_SIZE
        super().__init__(shape, _num_entries(budget, max_length), new_entries)
        self._mean_keys = ChunkMeans(self.entries, max_length, CHUNK_SIZE, "keys")
        self._mean_values = ChunkMeans(self.entries, max_length, CHUNK_SIZE, "values")
        self._built_at: int | None = None
        self._num_fed = 0

    def _take_in(self, full: FullKVCache, queries: Queries) -> None:
        if full.length >= self._first_build:
            built_at = self._first_build + (full.length - self._first_build) // PERIOD * PERIOD
            if built_at != self._built_at:
                self._build(full, built_at, queries(built_at))
        self.entries.copy(full, slice(self._num_fed, full.length), self._num_sequence_entries)
        self._num_sequence_entries += full.length - self._num_fed
        self._num_fed = full.length

    def _build(self, full: FullKVCache, length: int, queries: torch.Tensor) -> None:
        """Choose among the chunks of the first `length` positions; the newest positions are copied afterwards."""
        num_chunks = (length - NUM_PINNED - NUM_RECENT) // CHUNK_SIZE
        scores = chunk_scores(self._mean_keys.extend(full, num_chunks), queries)
        mean_values = self._mean_values.extend(full, num_chunks)
        self._fill(full, scores.argsort(dim=-1, descending=True), mean_values)
        num_whole = NUM_PINNED + self._num_chosen * CHUNK_SIZE
        self._num_sequence_entries = num_whole + num_chunks - self._num_chosen
        bias = np.zeros(self._num_sequence_entries, dtype=np.float32)
        bias[num_whole:] = math.log(CHUNK_SIZE)
        self.bias = bias
        self._num_fed = NUM_PINNED + num_chunks * CHUNK_SIZE
        self._built_at = length

    def _fill(self, full: FullKVCache, order: torch.Tensor, mean_values: torch.Tensor) -> None:
        """Write all entries from chunks in falling order of importance, `[num_layers, num_kv_heads, num_chunks]`."""
        chosen, others = order[..., : self._num_chosen], order[..., self._num_chosen :]
        first = torch.arange(NUM_PINNED, device=self.shape.device).expand(*order.shape[:2], -1)
        inside = torch.arange(CHUNK_SIZE, device=self.shape.device)
        whole = torch.cat([first, (NUM_PINNED + chosen[..., None] * CHUNK_SIZE + inside).flatten(2)], dim=2)
        middles = NUM_PINNED + others * CHUNK_SIZE + CHUNK_SIZE // 2
        self.entries.gather(full, torch.cat([whole, middles], dim=2), 0)
        self.entries.gather_values(mean_values, others, whole.shape[2])


def summary_positions(budget: int, max_length: int) -> int:
    """Count a cache's memory on its device, in positions of a full cache: its entries, and means of all chunks."""
    return capacity_for(_num_entries(budget, max_length)) + max_length // CHUNK_SIZE


def _num_chosen(budget: int) -> int:
    """Chunks that are held whole."""
    return max(1, (budget - NUM_PINNED - NUM_RECENT) // CHUNK_SIZE)


def _num_entries(budget: int, max_length: int) -> int:
    """The most entries that a sequence ever has: all before the first build, or those chosen and one for each chunk."""
    chosen = _num_chosen(budget) * CHUNK_SIZE
    first_build = NUM_PINNED + NUM_RECENT + 2 * chosen
    num_whole = NUM_PINNED + chosen + NUM_RECENT + CHUNK_SIZE + PERIOD
    return min(max_length, max(first_build, num_whole + max_length // CHUNK_SIZE))


class ChunkMeans:
    """Means over the chunks behind the pinned positions; on the device, wherever the cache itself lives."""

    def __init__(self, entries: Entries, max_length: int, chunk_size: int, part: Literal["keys", "values"]) -> None:
        self._entries, self._part = entries, PARTS[part]
        self._chunk_size = chunk_size
        self._num_chunks = 0
        self._means = entries.new_means(self._part, max_length // chunk_size)

    def extend(self, full: FullKVCache, num_chunks: int) -> torch.Tensor:
        """Take in what is new up to `num_chunks` chunks; returns `[num_layers, num_kv_heads, num_chunks, head_dim]`."""
        if num_chunks > self._num_chunks:
            first = NUM_PINNED + self._num_chunks * self._chunk_size
            positions = slice(first, NUM_PINNED + num_chunks * self._chunk_size)
            self._entries.average(full, self._part, positions, self._means[:, :, self._num_chunks : num_chunks])
            self._num_chunks = num_chunks
        return self._means[:, :, :num_chunks]


def chunk_scores(mean_keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Share of a token's attention that each chunk gets by its mean key (TriForce 4.1), over the group's query heads.

    `mean_keys [..., num_kv_heads, num_chunks, head_dim]`, `queries [..., num_kv_heads, group, head_dim]`; the result
    `[..., num_kv_heads, num_chunks] float32`.
    """
    scores = (mean_keys @ queries.transpose(-1, -2)).float() * queries.shape[-1] ** -0.5
    return torch.softmax(scores, dim=-2).sum(dim=-1)
