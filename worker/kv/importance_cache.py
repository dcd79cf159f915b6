"""The partial caches of the papers: the most important positions (TokenSwift 3.3), and chunks (TriForce 4.1)."""

from __future__ import annotations

import numpy as np
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
            built_at = self._build_position(end)
            if built_at != self._built_at:
                self._build(full, built_at, queries)
            self._replace(full, end)
        self._num_sequence_entries = min(self._num_fed, self._budget)

    def _build_position(self, end: int) -> int:
        """Return the position of the newest build that is due at `end`."""
        return _grid(self._first_build, self._period, end)

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


def _grid(first: int, period: int, end: int) -> int:
    """Return the last of the positions `first`, `first + period`, ... up to `end`."""
    return first + (end - first) // period * period


def importance(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return q . k summed over the query heads of a key-value head (TokenSwift's equation 2).

    `keys [num_kv_heads, num_positions, head_dim]`, `queries [num_kv_heads, group, head_dim]`, result `[num_kv_heads,
    num_positions] float32`.
    """
    return (keys @ queries.transpose(1, 2)).float().sum(dim=-1)


CHUNK_SIZE = 8
STRIDE = 256  # positions between two builds
ROLLING = 64  # drafted tokens over which the rolling acceptance rate roughly averages
LEAST_AGE = 32  # positions behind a build before a low acceptance rate may ask for the next one
STATE = "retrieval_cache"


class RetrievalKVCache(ImportanceKVCache):
    """Whole chunks, best first; omitted ones may return at the next build.

    A build is due at a stride, and where the rolling acceptance rate falls below `rebuild_below` (TriForce 4.1).
    """

    def __init__(
        self,
        shape: CacheShape,
        budget: int,
        sequence: Sequence,
        new_entries: NewEntries = Entries,
        /,
        chunk_size: int = CHUNK_SIZE,
        stride: int = STRIDE,
        rebuild_below: float = 0.0,
    ) -> None:
        self._num_chosen = max(1, -(-(budget - NUM_PINNED) // chunk_size))  # chunks
        # the positions since the last whole chunk before a build also overwrite entries
        period = min(stride, max(1, (self._num_chosen - 1) * chunk_size))
        super().__init__(shape, NUM_PINNED + self._num_chosen * chunk_size, sequence, new_entries, period=period)
        self._chunk_size = chunk_size
        self._means = ChunkMeans(self.entries, sequence.max_length, chunk_size, "keys")
        self._rebuild_below = rebuild_below
        self._acceptance = 1.0  # rolling share of the chains' tokens that the full cache accepted
        self._rebuilt_at = 0  # position of the newest build that a low rate asked for; 0: none yet

    def observe(self, num_checked: int, num_accepted: int, length: int) -> None:
        self._acceptance += min(1.0, num_checked / ROLLING) * (num_accepted / num_checked - self._acceptance)
        if self._acceptance < self._rebuild_below and length - self._build_position(length) >= LEAST_AGE:
            self._rebuilt_at, self._acceptance = length, 1.0

    def state(self) -> dict[str, np.ndarray]:
        return {STATE: np.array([self._acceptance, self._rebuilt_at])} if self._rebuild_below else {}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        if not self._rebuild_below:
            return
        found = state.get(STATE, np.array([1.0, 0.0]))  # an earlier attempt may have had other options
        if found.shape != (2,) or not (0 <= found[0] <= 1 and found[1] >= 0):
            raise ValueError(f"retrieval cache: found {found}, expected an acceptance rate and a position")
        self._acceptance, self._rebuilt_at = float(found[0]), int(found[1])

    def _build_position(self, end: int) -> int:
        return _grid(max(self._first_build, self._rebuilt_at), self._period, end)

    def _choose(self, full: FullKVCache, length: int, queries: Queries) -> tuple[torch.Tensor, int]:
        num_chunks = (length - NUM_PINNED) // self._chunk_size
        scores = chunk_scores(self._means.extend(full, num_chunks), queries(length))
        best = scores.topk(self._num_chosen, dim=-1).indices
        inside = torch.arange(self._chunk_size, device=self.shape.device)
        positions = NUM_PINNED + best[..., None] * self._chunk_size + inside
        return positions.flatten(-2), NUM_PINNED + num_chunks * self._chunk_size
