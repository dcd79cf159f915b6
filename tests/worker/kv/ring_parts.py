"""Forwards over a layer ring without a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_offload import OffloadedArena, RingRows, Streams, Visit
from tests.worker.kv.cache_parts import rows_of, shape
from tests.worker.kv.lazy_stream import LazyStream

LENGTH = 300
NUM_SLOTS = 2


class EagerLane(LazyStream):
    """Copies as early as possible, so that a missing wait overwrites data in use."""

    def submit(self, work: Callable[[], object]) -> None:
        work()


class Pair(NamedTuple):
    ours: FullKVCache
    theirs: FullKVCache


class Written(NamedTuple):
    visit: Visit
    first_entry: int
    rows: list[torch.Tensor]  # of each layer [2, num_kv_heads, num_rows, head_dim]
    expected: list[torch.Tensor]  # [2, num_kv_heads, first_entry, head_dim]


class RingForwards:
    """A computation as late as possible."""

    def __init__(self, num_layers: int, coming: LazyStream, going: LazyStream) -> None:
        self.shape = shape(num_layers)
        self.computation = LazyStream()
        self.arena = OffloadedArena(self.shape, NUM_SLOTS, LENGTH, Streams(self.computation, coming, going))
        self.arena.buffer.fill_(torch.nan)
        self.num_wrong = 0

    def pair(self) -> Pair:
        return Pair(self.arena.new_cache(LENGTH), FullKVCache(self.shape, LENGTH))

    def forward(self, runs: list[tuple[Pair, int, int]]) -> None:
        """`runs` has each pair's first entry and number of rows."""
        ring, written = self.arena, [self._written(*run) for run in runs]
        ring.begin([each.visit for each in written])
        for layer in range(self.shape.num_layers):
            ring.wait(layer)
            self.computation.submit(functools.partial(self._compute, layer, written))
            ring.leave(layer)

    def finish(self) -> None:
        self.computation.record_event().synchronize()

    def step(self, pairs: list[Pair], sizes: list[int], paths: list[list[int]]) -> None:
        """Run trees and commit their accepted paths."""
        self.forward([(pair, pair.ours.length, size) for pair, size in zip(pairs, sizes, strict=True)])
        for pair, path in zip(pairs, paths, strict=True):
            for cache in pair:
                cache.commit(path)

    def _written(self, pair: Pair, first_entry: int, num_rows: int) -> Written:
        ours = pair.ours.rows
        assert isinstance(ours, RingRows)
        rows, expected = [], []
        for layer in range(self.shape.num_layers):
            before = torch.stack(pair.theirs.layer(layer))
            expected.append(before[:, :, :first_entry].clone())
            rows.append(torch.stack(rows_of(self.shape, num_rows)))
            pair.theirs.write(layer, first_entry, *rows[-1])
        return Written(ours.visit(first_entry, first_entry + num_rows, pair.ours.length), first_entry, rows, expected)

    def _compute(self, layer: int, written: list[Written]) -> None:
        side = self.arena.buffer[layer % len(self.arena.buffer)]
        for each in written:
            on_device = side[:, each.visit.slot]
            self.num_wrong += not on_device[:, :, : each.first_entry].equal(each.expected[layer])
            on_device[:, :, each.visit.written[0]] = each.rows[layer]
