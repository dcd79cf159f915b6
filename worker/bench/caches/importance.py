"""The positions that matter most (TokenSwift 3.3), new ones in place of the least important.

The first positions are pinned, the others lie in falling order of importance. Newly committed positions overwrite from
the least important end; when all are overwritten the cache is built anew, by the query of the token that stands there.
"""

from __future__ import annotations

import torch

from swiftbatch.worker.caches.full import CacheShape, FullKVCache
from swiftbatch.worker.caches.partial import NUM_PINNED, Entries, NewEntries, PartialCache, Queries
from swiftbatch.worker.drawing.sequence import Sequence


class ImportanceKVCache(PartialCache):
    """At most `budget` positions, chosen for each layer and head. It is built at fixed positions."""

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
        """Choose by importance at the prompt's last position, or where the budget is full, and every `period` anew.

        The output stays out of a static one for ever. Without a period it is built when all chosen positions are
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
        self._num_fed = 0  # positions of the sequence that it has seen
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
        """Positions for the entries behind the pinned ones, `[num_layers, num_kv_heads, budget - NUM_PINNED]`.

        They lie below `length`, in falling order of importance; also returns how many positions were looked at.
        """
        importances = [
            importance(self._keys(full, layer, slice(NUM_PINNED, length)), query)
            for layer, query in enumerate(queries(length))
        ]
        return NUM_PINNED + torch.stack(importances).topk(self._budget - NUM_PINNED, dim=-1).indices, length

    def _take_all(self, full: FullKVCache, end: int) -> None:
        """Take in all positions, in order, as long as they fit."""
        self.entries.copy(full, slice(self._num_fed, end), self._num_fed)
        self.positions[:, :, self._num_fed : end] = torch.arange(self._num_fed, end, device=self.shape.device)
        self._num_fed = end

    def _build(self, full: FullKVCache, built_at: int, queries: Queries) -> None:
        """Fill all entries anew."""
        chosen, num_seen = self._choose(full, built_at, queries)
        self.positions[:, :, :NUM_PINNED] = torch.arange(NUM_PINNED, device=self.shape.device)
        self.positions[:, :, NUM_PINNED:] = chosen
        self.entries.gather(full, self.positions, 0)
        self._built_at = built_at
        self._first_new = self._num_fed = num_seen

    def _replace(self, full: FullKVCache, end: int) -> None:
        """Overwrite the least important entries with the positions up to `end`."""
        if end == self._num_fed:
            return
        new = torch.arange(self._num_fed, end, device=self.shape.device)
        entries = self._budget - 1 - (new - self._first_new)
        self.entries.replace(full, slice(self._num_fed, end), entries)
        self.positions[:, :, entries] = new
        self._num_fed = end


def importance(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Score how much positions matter to a token: q . k, summed over the query heads of a key-value head (equation 2).

    `keys [num_kv_heads, num_positions, head_dim]`, `queries [num_kv_heads, group, head_dim]`; the result
    `[num_kv_heads, num_positions] float32`.
    """
    return (keys @ queries.transpose(1, 2)).float().sum(dim=-1)
