"""Means of a sequence's keys or values over chunks of positions, each taken once, when its chunk is whole."""

from __future__ import annotations

from typing import Literal

import torch

from swiftbatch.worker.caches.entries import Entries
from swiftbatch.worker.caches.full import FullKVCache
from swiftbatch.worker.caches.partial import NUM_PINNED

PARTS = {"keys": 0, "values": 1}


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
