"""Summarised key-value cache: the chunks that matter most whole, every other chunk as one slot, the newest positions.

Where attention is spread over the whole text, the most important positions alone are a poor guess of it: most of the
weight lies in what is left out. Here nothing is left out. A chunk's slot has the key of its middle position, the mean
of its values, and the logarithm of its size added to its score: it weighs what the positions it stands for weigh.
"""

from __future__ import annotations

import math

import torch

from worker.cache import CacheShape, FullKVCache
from worker.draft_cache import NUM_PINNED, DraftCache, Queries

CHUNK_SIZE = 32
NUM_RECENT = 256  # newest positions, whole whatever their importance
PERIOD = 256  # positions from one build to the next


class SummaryKVCache(DraftCache):
    """Pinned positions, chosen chunks, summaries of the others, newest positions. It is built at fixed positions."""

    def __init__(self, shape: CacheShape, budget: int, max_length: int) -> None:
        """`budget` counts the slots that hold whole positions; there is one more for every chunk left out."""
        self._num_chosen = max(1, (budget - NUM_PINNED - NUM_RECENT) // CHUNK_SIZE)  # chunks
        self._first_build = NUM_PINNED + NUM_RECENT + 2 * self._num_chosen * CHUNK_SIZE
        num_chunks = max_length // CHUNK_SIZE
        num_whole = NUM_PINNED + self._num_chosen * CHUNK_SIZE + NUM_RECENT + CHUNK_SIZE + PERIOD
        super().__init__(shape, min(max_length, max(self._first_build, num_whole + num_chunks)))
        size = (shape.num_layers, shape.num_kv_heads, num_chunks, shape.head_dim)
        self._mean_keys = torch.empty(size, dtype=shape.dtype, device=shape.device)
        self._mean_values = torch.empty_like(self._mean_keys)
        self._num_chunks = 0  # those whose means are known
        self._built_at: int | None = None
        self._num_fed = 0

    def _take_in(self, full: FullKVCache, queries: Queries) -> None:
        if full.length >= self._first_build:
            built_at = self._first_build + (full.length - self._first_build) // PERIOD * PERIOD
            if built_at != self._built_at:
                self._build(full, built_at, queries(built_at))
        self._copy(full, slice(self._num_fed, full.length), self._num_sequence_slots)
        self._num_sequence_slots += full.length - self._num_fed
        self._num_fed = full.length

    def _build(self, full: FullKVCache, length: int, queries: torch.Tensor) -> None:
        """Choose among the chunks of the first `length` positions; the newest positions are copied afterwards."""
        num_chunks = (length - NUM_PINNED - NUM_RECENT) // CHUNK_SIZE
        for layer in range(self.shape.num_layers):
            self._summarise(full, layer, num_chunks)
            scores = chunk_scores(self._mean_keys[layer, :, :num_chunks], queries[layer])
            self._fill(full, layer, scores.argsort(dim=-1, descending=True))
        self._num_chunks = num_chunks
        num_whole = NUM_PINNED + self._num_chosen * CHUNK_SIZE
        self._num_sequence_slots = num_whole + num_chunks - self._num_chosen
        self.bias = torch.zeros(self._num_sequence_slots, dtype=self.shape.dtype, device=self.shape.device)
        self.bias[num_whole:] = math.log(CHUNK_SIZE)
        self._num_fed = NUM_PINNED + num_chunks * CHUNK_SIZE
        self._built_at = length

    def _summarise(self, full: FullKVCache, layer: int, num_chunks: int) -> None:
        """Take the means of the chunks that are whole since the last build."""
        new = slice(self._num_chunks, num_chunks)
        positions = slice(NUM_PINNED + new.start * CHUNK_SIZE, NUM_PINNED + new.stop * CHUNK_SIZE)
        for means, source in zip((self._mean_keys, self._mean_values), full.layer(layer), strict=True):
            chunks = source[:, positions].unflatten(1, (-1, CHUNK_SIZE))  # [num_kv_heads, num_new, size, head_dim]
            means[layer, :, new] = chunks.float().mean(dim=2).to(means.dtype)

    def _fill(self, full: FullKVCache, layer: int, order: torch.Tensor) -> None:
        """Write the slots of one layer from its chunks in falling order of importance, `[num_kv_heads, num_chunks]`."""
        keys, values = full.layer(layer)
        chosen, others = order[:, : self._num_chosen], order[:, self._num_chosen :]
        first = torch.arange(NUM_PINNED, device=self.shape.device).expand(len(order), -1)
        inside = torch.arange(CHUNK_SIZE, device=self.shape.device)
        whole = torch.cat([first, (NUM_PINNED + chosen[..., None] * CHUNK_SIZE + inside).flatten(1)], dim=1)
        middles = NUM_PINNED + others * CHUNK_SIZE + CHUNK_SIZE // 2
        end = whole.shape[1] + others.shape[1]
        self._buffer[layer, 0, :, :end] = _rows(keys, torch.cat([whole, middles], dim=1))
        self._buffer[layer, 1, :, : whole.shape[1]] = _rows(values, whole)
        self._buffer[layer, 1, :, whole.shape[1] : end] = _rows(self._mean_values[layer], others)


def chunk_scores(mean_keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Share of a token's attention that each chunk gets by its mean key (TriForce 4.1), over the group's query heads.

    `mean_keys [num_kv_heads, num_chunks, head_dim]`, `queries [num_kv_heads, group, head_dim]`; the result
    `[num_kv_heads, num_chunks] float32`.
    """
    scores = (mean_keys @ queries.transpose(1, 2)).float() * queries.shape[-1] ** -0.5
    return torch.softmax(scores, dim=1).sum(dim=-1)


def _rows(source: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows `[num_kv_heads, num_rows, head_dim]` of each head's own `positions [num_kv_heads, num_rows]`."""
    return source.gather(1, positions[..., None].expand(-1, -1, source.shape[-1]))
