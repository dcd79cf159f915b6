"""Steps on a GPU: how long it is busy, what the host adds, and what the memory alone would take.

Then prompts and checkpoints: tokens read a second, and a cache that is taken out and put into another slot.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence

import torch

from bench.gpu.gpu_figures import GPUResumeRecord, GPUStepRecord, ReadRecord
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import ArenaTarget, Parts
from swiftbatch.worker.forward.step_costs import Clock, clock_of
from swiftbatch.worker.forward.tile_packing import SequenceRows, max_tree_depth, tree_rows
from swiftbatch.worker.kernels.cuda.cuda_graph import Graph, Repeated, Work, capture
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree

PIECE = 1024  # positions of a checkpoint's segment


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
    caches: list[FullKVCache],
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


def _groups(caches: list[FullKVCache], length: int, num_rows: int, vocab_size: int, seed: int) -> list[SequenceRows]:
    rng, groups = random.Random(seed), []
    for cache in caches:
        cache.length = length
        num_nodes = num_rows - 1 if max_tree_depth(length) else 0
        tree = DraftTree(rng.sample(range(vocab_size), num_nodes), [ROOT] * num_nodes)
        groups.append(tree_rows(cache, rng.randrange(vocab_size), tree))
    return groups


def read_records(parts: Parts, starts: Sequence[int], num_tokens: int) -> Iterator[ReadRecord]:
    """Known tokens behind caches of these lengths: a prompt's, or those of a job that is replayed."""
    longest = max(starts) + num_tokens
    target = parts.target(1, longest)
    target.arena.buffer.normal_(generator=parts.generator(6))
    cache, rng = target.new_cache(longest), random.Random(0)
    token_ids = [rng.randrange(target.vocab_size) for _ in range(num_tokens)]
    target.read(cache, token_ids[:1])
    for start in starts:
        cache.length = start
        target.synchronize()
        started = time.perf_counter()
        while cache.length < start + num_tokens:
            target.read(cache, token_ids[cache.length - start :])
        target.synchronize()
        yield ReadRecord(start=start, num_tokens=num_tokens, seconds=time.perf_counter() - started)


def resume_record(parts: Parts, length: int) -> GPUResumeRecord:
    """Keys and values of a slot to the host, piece by piece as checkpoints take them, and into another slot."""
    target = parts.target(2, length)
    target.arena.buffer.normal_(generator=parts.generator(7))
    cache, resumed = (target.new_cache(length) for _ in range(2))
    cache.reserve(length)
    cache.length = length
    out_seconds = in_seconds = 0.0
    for start in range(0, length, PIECE):
        target.synchronize()
        times = [time.perf_counter()]
        kv = cache.kv(start, min(start + PIECE, length))
        times.append(time.perf_counter())
        resumed.load(kv)
        target.synchronize()
        times.append(time.perf_counter())
        out_seconds, in_seconds = out_seconds + times[1] - times[0], in_seconds + times[2] - times[1]
    return GPUResumeRecord(
        length=length,
        num_bytes=length * parts.cache_shape().bytes_per_position(),
        out_seconds=out_seconds,
        in_seconds=in_seconds,
        same_bits=_same_bits(cache, resumed, length),
    )


def _same_bits(ours: FullKVCache, theirs: FullKVCache, length: int) -> bool:
    """Tell whether all bits are the same, layer by layer: a copy of all would have no room."""
    whole = torch.int16 if ours.shape.row_dtype.itemsize == 2 else torch.int32
    return all(
        torch.equal(a.view(whole), b.view(whole))
        for layer in range(ours.shape.num_layers)
        for a, b in zip(*(cache.stored_between(layer, slice(0, length)) for cache in (ours, theirs)), strict=True)
    )
