"""Partial key-value cache (TokenSwift 3.3): the positions that matter most, new ones in place of the least important.

The first positions are pinned, the others lie in falling order of importance. Newly committed positions overwrite from
the least important end; when all are overwritten the cache is built anew, by the query of the token that stands there.
"""

from __future__ import annotations

import torch

from worker.cache import CacheShape, FullKVCache
from worker.draft_cache import NUM_PINNED, DraftCache, Queries


class PartialKVCache(DraftCache):
    """At most `budget` positions, chosen for each layer and head. It is built at fixed positions."""

    def __init__(self, shape: CacheShape, budget: int, first_build: int, last_fed: int | None = None) -> None:
        """Choose by importance from position `first_build` on, if that is above the budget.

        Positions from `last_fed` on stay out for ever (the paper's static cache); None: all go in.
        """
        self._budget = max(budget, NUM_PINNED + 1)
        super().__init__(shape, self._budget)
        self._first_build = max(first_build, self._budget)
        self._last_fed = last_fed
        self._built_at: int | None = None
        self._num_fed = 0  # positions of the sequence that it has seen
        self.positions = torch.full((shape.num_layers, shape.num_kv_heads, self._budget), -1, device=shape.device)

    def _take_in(self, full: FullKVCache, queries: Queries) -> None:
        end = full.length if self._last_fed is None else min(full.length, self._last_fed)
        if end < self._first_build:
            self._append(full, end)
        else:
            period = self._budget - NUM_PINNED
            built_at = self._first_build + (end - self._first_build) // period * period
            if built_at != self._built_at:
                self._build(full, built_at, queries(built_at))
            self._replace(full, end)
        self._num_sequence_slots = min(self._num_fed, self._budget)

    def _append(self, full: FullKVCache, end: int) -> None:
        """As long as all positions fit, they lie in order."""
        self._copy(full, slice(self._num_fed, end), self._num_fed)
        self.positions[:, :, self._num_fed : end] = torch.arange(self._num_fed, end, device=self.shape.device)
        self._num_fed = end

    def _build(self, full: FullKVCache, length: int, queries: torch.Tensor) -> None:
        """Choose the most important of the first `length` positions, in every layer and head."""
        num_chosen = self._budget - NUM_PINNED
        for layer in range(self.shape.num_layers):
            keys, values = full.layer(layer)
            scores = importance(keys[:, NUM_PINNED:length], queries[layer])
            self.positions[layer, :, :NUM_PINNED] = torch.arange(NUM_PINNED, device=self.shape.device)
            self.positions[layer, :, NUM_PINNED:] = NUM_PINNED + scores.topk(num_chosen, dim=-1).indices
            rows = self.positions[layer, :, :, None].expand(-1, -1, self.shape.head_dim)
            self._buffer[layer, 0, :, : self._budget] = keys.gather(1, rows)
            self._buffer[layer, 1, :, : self._budget] = values.gather(1, rows)
        self._built_at = self._num_fed = length

    def _replace(self, full: FullKVCache, end: int) -> None:
        """Overwrite the least important slots with the positions up to `end`."""
        if end == self._num_fed:
            return
        assert self._built_at is not None
        new = torch.arange(self._num_fed, end, device=self.shape.device)
        slots = self._budget - 1 - (new - self._built_at)
        for layer in range(self.shape.num_layers):
            for part, source in enumerate(full.layer(layer)):
                self._buffer[layer, part, :, slots] = source[:, new]
        self.positions[:, :, slots] = new
        self._num_fed = end


def importance(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """How much positions matter to a token: q . k, summed over the query heads of a key-value head (equation 2).

    `keys [num_kv_heads, num_positions, head_dim]`, `queries [num_kv_heads, group, head_dim]`; the result
    `[num_kv_heads, num_positions] float32`.
    """
    return (keys @ queries.transpose(1, 2)).float().sum(dim=-1)
