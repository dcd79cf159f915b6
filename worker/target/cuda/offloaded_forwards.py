"""Forwards of a dense decoder whose caches lie in the host's memory: a graph for each layer, replayed as it comes."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import cast

import torch

from swiftbatch.worker.caches.full_cache import FullKVCache
from swiftbatch.worker.caches.layer_ring import Visit
from swiftbatch.worker.caches.offloaded_arena import OffloadedArena, OffloadedSlotCache
from swiftbatch.worker.drawing.draft_tree import DraftTree
from swiftbatch.worker.target.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.target.tiles import SequenceRows, tree_rows


class OffloadedForwards(CudaForwards):
    """`CudaForwards` over an `OffloadedArena`: the same launches over the same rows, so the same bits."""

    arena: OffloadedArena

    def _prepare(self) -> None:
        decoder = self._decoder
        self._begin, self._end = (self.capture(work, self.device) for work in (decoder.begin, decoder.end))
        self._layers = [
            self.capture(functools.partial(decoder.run_layer, number), self.device)
            for number in range(self.sizes.num_layers)
        ]

    def queries(self, cache: FullKVCache, token_id: int) -> torch.Tensor:
        sizes = self.sizes
        heads = (sizes.num_kv_heads, sizes.num_heads // sizes.num_kv_heads, sizes.head_dim)
        queries = torch.empty(sizes.num_layers, *heads, dtype=sizes.dtype, device=self.device)

        def keep(layer: int, query: torch.Tensor) -> None:
            queries[layer] = query[0]

        self._pass([tree_rows(cache, token_id, DraftTree())], keep)
        return queries

    def _prepare_queries(self) -> None:
        """Prepare nothing: layers come one by one, and are launched one by one."""

    def _pass(self, groups: list[SequenceRows], tap: Callable[[int, torch.Tensor], None] | None = None) -> None:
        self._send(groups)
        ring = self.arena.ring
        ring.begin(visits_of(groups))
        self._begin.replay()
        for number, layer in enumerate(self._layers):
            ring.wait(number)
            if tap is None:
                layer.replay()
            else:
                self._decoder.run_layer(number, tap)
            ring.leave(number)
        self._end.replay()


def visits_of(groups: list[SequenceRows]) -> list[Visit]:
    """Return a visit for each slot that rows read or write.

    Views of one cache may run side by side, each behind its own positions.
    """
    by_slot = defaultdict[int, list[Visit]](list)
    for group in groups:
        visit = cast("OffloadedSlotCache", group.cache).visit(group.first_entry, group.first_entry + len(group))
        by_slot[visit.slot].append(visit)
    return [_united(visits) for visits in by_slot.values()]


def _united(visits: list[Visit]) -> Visit:
    written = tuple(rows for visit in visits for rows in visit.written)
    num_final, end = min(visit.num_final for visit in visits), max(visit.end for visit in visits)
    return Visit(visits[0].slot, visits[0].rows, num_final, end, written)
