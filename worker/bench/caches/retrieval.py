"""The caches that drafts see in TriForce: retrieved chunks, and the policies that it is compared with (4.1, table 1).

Each differs from the importance cache in what it chooses alone: the chunks that the newest token's query attends to
most by their mean keys; the newest positions (StreamingLLM); the positions that had most attention so far, of which
what was evicted never comes back (H2O).
"""

from __future__ import annotations

import torch

from swiftbatch.worker.bench.caches.importance import ImportanceKVCache
from swiftbatch.worker.caches.full import CacheShape, FullKVCache
from swiftbatch.worker.caches.partial import NUM_PINNED, Entries, NewEntries, Queries
from swiftbatch.worker.caches.summary import ChunkMeans, chunk_scores
from swiftbatch.worker.drawing.sequence import Sequence

CHUNK_SIZE = 8
STRIDE = 256  # positions from one build to the next
OBSERVED_EVERY = 64  # positions from one query to the next that H2O's sums of attention take in


class RetrievalKVCache(ImportanceKVCache):
    """Whole chunks, best first. Whatever was left out may come back at the next build."""

    def __init__(
        self,
        shape: CacheShape,
        budget: int,
        sequence: Sequence,
        new_entries: NewEntries = Entries,
        /,
        chunk_size: int = CHUNK_SIZE,
    ) -> None:
        """`budget` is rounded up to whole chunks behind the pinned positions."""
        self._num_chosen = max(1, -(-(budget - NUM_PINNED) // chunk_size))  # chunks
        super().__init__(shape, NUM_PINNED + self._num_chosen * chunk_size, sequence, new_entries, period=STRIDE)
        self._chunk_size = chunk_size
        self._means = ChunkMeans(self.entries, sequence.max_length, chunk_size, "keys")

    def _choose(self, full: FullKVCache, length: int, queries: Queries) -> tuple[torch.Tensor, int]:
        num_chunks = (length - NUM_PINNED) // self._chunk_size
        scores = chunk_scores(self._means.extend(full, num_chunks), queries(length))
        best = scores.topk(self._num_chosen, dim=-1).indices
        inside = torch.arange(self._chunk_size, device=self.shape.device)
        positions = NUM_PINNED + best[..., None] * self._chunk_size + inside
        return positions.flatten(-2), NUM_PINNED + num_chunks * self._chunk_size


class StreamingKVCache(ImportanceKVCache):
    """The pinned and the newest positions (Xiao et al. 2023)."""

    def _choose(self, full: FullKVCache, length: int, queries: Queries) -> tuple[torch.Tensor, int]:
        newest = torch.arange(length - 1, length - 1 - (self._budget - NUM_PINNED), -1, device=self.shape.device)
        return newest.expand(self.shape.num_layers, self.shape.num_kv_heads, -1), length


class HeavyHitterKVCache(ImportanceKVCache):
    """Half of the budget is the newest positions, half those with the largest sums of attention (Zhang et al. 2023).

    The sums take in every 64th query; positions are evicted as those come, each head on its own, and stay evicted.
    """

    def __init__(
        self, shape: CacheShape, budget: int, sequence: Sequence, new_entries: NewEntries = Entries, /
    ) -> None:
        super().__init__(shape, budget, sequence, new_entries, period=OBSERVED_EVERY)
        self._first_build = self._budget
        self._sums = torch.zeros(shape.num_layers, shape.num_kv_heads, self._budget, device=shape.device)
        self._held = torch.arange(self._budget, device=shape.device).repeat(shape.num_layers, shape.num_kv_heads, 1)
        self._num_observed = self._budget

    def _choose(self, full: FullKVCache, length: int, queries: Queries) -> tuple[torch.Tensor, int]:
        while self._num_observed < length:
            self._num_observed += self._period
            self._observe(full, self._num_observed, queries(self._num_observed))
        is_recent = self._held >= length - self._budget // 2
        order = self._sums.masked_fill(is_recent, torch.inf).masked_fill(self._held < NUM_PINNED, -torch.inf)
        best = order.argsort(dim=-1, descending=True)[..., : self._budget - NUM_PINNED]
        return self._held.gather(-1, best), length

    def _observe(self, full: FullKVCache, length: int, queries: torch.Tensor) -> None:
        """Take in the positions up to `length` and one query's attention, then evict down to the budget."""
        new = torch.arange(length - self._period, length, device=self.shape.device)
        new = new.expand(self.shape.num_layers, self.shape.num_kv_heads, -1)
        held = torch.cat([self._held, new], dim=-1)
        sums = torch.cat([self._sums, torch.zeros_like(new, dtype=self._sums.dtype)], dim=-1)
        for layer, query in enumerate(queries):
            rows = held[layer, ..., None].expand(-1, -1, self.shape.head_dim)
            keys = full.stored(layer)[0]
            sums[layer] += chunk_scores(keys.gather(1, rows.to(keys.device)).to(self.shape.device), query)
        stays = (held >= length - self._budget // 2) | (held < NUM_PINNED)
        kept = sums.masked_fill(stays, torch.inf).topk(self._budget, dim=-1).indices
        self._held, self._sums = held.gather(-1, kept), sums.gather(-1, kept)
