"""Steps on a GPU: how long it is busy, what the host adds, and what the memory alone would take."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence

import torch

from swiftbatch.worker.bench.gpu.records import GPUStepRecord
from swiftbatch.worker.caches.arena import ArenaKVCache
from swiftbatch.worker.drawing.tree import ROOT, DraftTree
from swiftbatch.worker.exactness.first_run.parts import ArenaTarget, Parts
from swiftbatch.worker.kernels.cuda.graph import Graph, Repeated, Work, capture
from swiftbatch.worker.target.cuda.clock import Clock, clock_of
from swiftbatch.worker.target.tiles import SequenceRows, max_tree_depth, tree_rows


class Stopwatch:
    """A `Capture` whose graphs take the time of every replay, and wait for it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seconds = 0.0  # of the newest replay

    def __call__(self, work: Work, device: torch.device) -> Graph:
        graph = capture(work, device)

        def replay() -> None:
            self.seconds = self._clock.seconds(graph.replay)

        return Repeated(replay)


def step_records(
    parts: Parts, fitting: dict[int, list[int]], row_counts: Sequence[int], bandwidth: float
) -> Iterator[GPUStepRecord]:
    """Steps of so many slots at each of their `fitting` lengths; `bandwidth` is the memory's, bytes a second."""
    for num_slots, lengths in fitting.items():
        if not lengths:
            continue
        stopwatch = Stopwatch(clock_of(parts.device))
        target = parts.target(num_slots, lengths[-1] + max(row_counts), stopwatch)
        target.arena.buffer.normal_(generator=parts.generator(5))
        caches = [target.new_cache(lengths[-1] + max(row_counts)) for _ in range(num_slots)]
        for length in lengths:
            for num_rows in row_counts:
                yield _step(parts, target, stopwatch, caches, (length, num_rows), bandwidth)
        del target, caches
        parts.forget_unused()


def _step(
    parts: Parts,
    target: ArenaTarget,
    stopwatch: Stopwatch,
    caches: list[ArenaKVCache],
    place: tuple[int, int],
    bandwidth: float,
) -> GPUStepRecord:
    """Medians of some rounds at `place`: length, and rows of each slot."""
    length, num_rows = place
    busy, whole = [], []
    for seed in range(1 + parts.extent.num_rounds):
        started = time.perf_counter()
        target.verify(_groups(caches, length, num_rows, target.vocab_size, seed))
        target.synchronize()
        whole.append(time.perf_counter() - started)
        busy.append(stopwatch.seconds)
    busy_seconds, whole_seconds = (statistics.median(times[1:]) for times in (busy, whole))  # the first one warms up
    num_bytes = step_bytes(parts, length, len(caches))
    return GPUStepRecord(
        length=length,
        num_slots=len(caches),
        num_rows=num_rows,
        busy_ms=1000 * busy_seconds,
        host_ms=1000 * (whole_seconds - busy_seconds),
        num_bytes=num_bytes,
        roofline_ms=1000 * num_bytes / bandwidth,
    )


def step_bytes(parts: Parts, length: int, num_slots: int) -> int:
    """Count the bytes that a step has to read: all products' weights once, keys and values of every slot once."""
    return parts.weights.product_bytes + num_slots * length * parts.cache_shape().bytes_per_position()


def _groups(caches: list[ArenaKVCache], length: int, num_rows: int, vocab_size: int, seed: int) -> list[SequenceRows]:
    rng, groups = random.Random(seed), []
    for cache in caches:
        cache.length = length
        num_nodes = num_rows - 1 if max_tree_depth(length) else 0
        tree = DraftTree(rng.sample(range(vocab_size), num_nodes), [ROOT] * num_nodes)
        groups.append(tree_rows(cache, rng.randrange(vocab_size), tree))
    return groups
