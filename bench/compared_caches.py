"""The partial caches of the papers' tables; users' engines have the summarised one.

By importance (TokenSwift 3.3), by chunks (TriForce 4.1), the newest positions (StreamingLLM), those with most attention
so far (H2O).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.sparse_cache import (
    NUM_PINNED,
    ChunkMeans,
    Entries,
    NewEntries,
    Queries,
    SparseCache,
    SparseCacheFactory,
    SummaryKVCache,
    chunk_scores,
)
from swiftbatch.worker.sampling.sequence import Sequence


class ImportanceKVCache(SparseCache):
    """At most `budget` positions per layer and head."""

    def __init__(
        self,
        shape: CacheShape,
        budget: int,
        sequence: Sequence,
        new_entries: NewEntries = Entries,
        /,
        is_static: bool = False,
        period: int | None = None,
    ) -> None:
        """Choose at the prompt's end or a full budget, then every `period` positions.

        A static cache never includes the output. Without a period, it is rebuilt when all chosen positions are
        overwritten.
        """
        self._budget = max(budget, NUM_PINNED + 1)
        super().__init__(shape, self._budget, new_entries)
        first_build = sequence.num_prompt_tokens - 1
        self._period = min(period or self._budget, self._budget - NUM_PINNED)
        self._first_build = max(first_build, self._budget)
        self._last_fed = first_build if is_static else None
        self._built_at: int | None = None
        self._first_new = 0  # position that overwrites the last entry
        self._num_fed = 0  # positions seen
        self.positions = torch.full((shape.num_layers, shape.num_kv_heads, self._budget), -1, device=shape.device)

    def _take_in(self, full: FullKVCache, queries: Queries) -> None:
        end = full.length if self._last_fed is None else min(full.length, self._last_fed)
        if end < self._first_build:
            self._take_all(full, end)
        else:
            built_at = self._first_build + (end - self._first_build) // self._period * self._period
            if built_at != self._built_at:
                self._build(full, built_at, queries)
            self._replace(full, end)
        self._num_sequence_entries = min(self._num_fed, self._budget)

    def _choose(self, full: FullKVCache, length: int, queries: Queries) -> tuple[torch.Tensor, int]:
        """Return positions `[num_layers, num_kv_heads, budget - NUM_PINNED]` by importance, and how many were
        considered.
        """
        importances = [
            importance(self._keys(full, layer, slice(NUM_PINNED, length)), query)
            for layer, query in enumerate(queries(length))
        ]
        return NUM_PINNED + torch.stack(importances).topk(self._budget - NUM_PINNED, dim=-1).indices, length

    def _take_all(self, full: FullKVCache, end: int) -> None:
        self.entries.copy(full, slice(self._num_fed, end), self._num_fed)
        self.positions[:, :, self._num_fed : end] = torch.arange(self._num_fed, end, device=self.shape.device)
        self._num_fed = end

    def _build(self, full: FullKVCache, built_at: int, queries: Queries) -> None:
        chosen, num_seen = self._choose(full, built_at, queries)
        self.positions[:, :, :NUM_PINNED] = torch.arange(NUM_PINNED, device=self.shape.device)
        self.positions[:, :, NUM_PINNED:] = chosen
        self.entries.gather(full, self.positions, 0)
        self._built_at = built_at
        self._first_new = self._num_fed = num_seen

    def _replace(self, full: FullKVCache, end: int) -> None:
        """Overwrite the least important entries."""
        if end == self._num_fed:
            return
        new = torch.arange(self._num_fed, end, device=self.shape.device)
        entries = self._budget - 1 - (new - self._first_new)
        self.entries.replace(full, slice(self._num_fed, end), entries)
        self.positions[:, :, entries] = new
        self._num_fed = end


def importance(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return q . k summed over the query heads of a key-value head (equation 2).

    `keys [num_kv_heads, num_positions, head_dim]`, `queries [num_kv_heads, group, head_dim]`, result `[num_kv_heads,
    num_positions] float32`.
    """
    return (keys @ queries.transpose(1, 2)).float().sum(dim=-1)


CHUNK_SIZE = 8
STRIDE = 256  # positions between two builds
OBSERVED_EVERY = 64  # positions between two queries in H2O's sums


class RetrievalKVCache(ImportanceKVCache):
    """Whole chunks, best first; omitted ones may return at the next build."""

    def __init__(
        self,
        shape: CacheShape,
        budget: int,
        sequence: Sequence,
        new_entries: NewEntries = Entries,
        /,
        chunk_size: int = CHUNK_SIZE,
    ) -> None:
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


def with_cache(options: dict[str, Any]) -> dict[str, Any]:
    if "chunk_size" in options:
        cache = functools.partial(RetrievalKVCache, chunk_size=options["chunk_size"])
        return {name: value for name, value in options.items() if name != "chunk_size"} | {"cache": cache}
    return options | {"cache": PARTIAL_CACHES[options["cache"]]} if "cache" in options else options
