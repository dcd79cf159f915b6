"""The partial caches that the papers compare theirs with: the newest positions, most attention so far, few bits."""

from __future__ import annotations

import functools
from typing import Any

import torch

from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.importance_cache import ImportanceKVCache, RetrievalKVCache
from swiftbatch.worker.kv.sparse_cache import (
    NUM_PINNED,
    Entries,
    NewEntries,
    Queries,
    SparseCache,
    SparseCacheFactory,
    SummaryKVCache,
    chunk_scores,
)
from swiftbatch.worker.sampling.sequence import Sequence

OBSERVED_EVERY = 64  # positions between two queries in H2O's sums


class StreamingKVCache(ImportanceKVCache):
    """The pinned and the newest positions (Xiao et al. 2023)."""

    def _choose(self, full: FullKVCache, length: int, queries: Queries) -> tuple[torch.Tensor, int]:
        newest = torch.arange(length - 1, length - 1 - (self._budget - NUM_PINNED), -1, device=self.shape.device)
        return newest.expand(self.shape.num_layers, self.shape.num_kv_heads, -1), length


class HeavyHitterKVCache(ImportanceKVCache):
    """The newest positions and as many with the largest attention sums (Zhang et al. 2023).

    Sums include every 64th query; evictions are final.
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
        """Add the positions up to `length`, then evict."""
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


GROUP = 64  # positions rounded together; the newest incomplete group stays exact
MOST_BITS = 16


class QuantizedKVCache(SparseCache):
    """All positions in `num_bits` (KIVI, Liu et al. 2024).

    Keys are rounded per channel over a group of positions, values per position; entries keep the model's dtype.
    """

    def __init__(
        self, shape: CacheShape, num_bits: int, sequence: Sequence, new_entries: NewEntries = Entries, /
    ) -> None:
        super().__init__(shape, sequence.max_length, new_entries)
        self._num_steps = (1 << min(num_bits, MOST_BITS)) - 1  # steps from a group's minimum to its maximum
        self._num_rounded = 0  # positions

    def _take_in(self, full: FullKVCache, queries: Queries) -> None:
        self.entries.copy(full, slice(self._num_sequence_entries, full.length), self._num_sequence_entries)
        self._num_sequence_entries = full.length
        end = full.length // GROUP * GROUP
        for layer in range(self.shape.num_layers if end > self._num_rounded else 0):
            keys, values = (part[:, self._num_rounded : end] for part in self.layer(layer))
            groups = keys.unflatten(1, (-1, GROUP))  # [num_kv_heads, num_groups, GROUP, head_dim]
            keys.copy_(rounded(groups, 2, self._num_steps).flatten(1, 2))
            values.copy_(rounded(values, 2, self._num_steps))
        self._num_rounded = end


def rounded(numbers: torch.Tensor, dim: int, num_steps: int) -> torch.Tensor:
    """Round to `num_steps` equal steps between minimum and maximum, in float32."""
    exact = numbers.float()
    least, largest = exact.amin(dim, keepdim=True), exact.amax(dim, keepdim=True)
    step = ((largest - least) / num_steps).clamp_min(torch.finfo(torch.float32).tiny)
    return least + ((exact - least) / step).round() * step


PARTIAL_CACHES: dict[str, SparseCacheFactory] = {
    "summary": SummaryKVCache,  # the most important chunks, and one entry for each other chunk
    "dynamic": ImportanceKVCache,  # the most important positions; new ones replace the least important
    "static": functools.partial(ImportanceKVCache, is_static=True),  # the same, built once after the prompt
    # all positions
    "full": lambda shape, _, sequence, *room: ImportanceKVCache(shape, sequence.max_length, sequence, *room),
    "retrieval": RetrievalKVCache,  # the chunks with the most attention of the newest query
    "streaming": StreamingKVCache,  # the newest positions
    "h2o": HeavyHitterKVCache,  # half the newest, half with the most attention so far
    "quantized": QuantizedKVCache,  # all, with the budget as number of bits
    "topk": functools.partial(ImportanceKVCache, period=1),  # as dynamic, chosen before every draft
}


def without_cache(changes: dict[str, Any]) -> tuple[dict[str, Any], SparseCacheFactory | None]:
    """Return changes of an engine's options, and the partial cache among them; None: as the options say."""
    others = {name: value for name, value in changes.items() if name != "cache"}
    return others, PARTIAL_CACHES[changes["cache"]] if "cache" in changes else None
