"""Stages of copies: memory of the host that is pinned, its way to the GPU and back, checkpoints beside steps, files."""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import torch

from bench.gpu.decoding import random_ids
from bench.gpu.trial import Trial, Try, streams_of
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import ArenaTarget, Parts
from swiftbatch.worker.forward.cuda.cuda_forwards import OffloadedForwards
from swiftbatch.worker.forward.forward_backend import DTYPES
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_offload import OffloadedArena
from swiftbatch.worker.kv.offload_hosts import PinnedMemory
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.sampling.draft_tree import DraftTree

NUM_STEPS = 30
MOST_SLOWER = 1.5  # times a step that has a checkpoint beside it; more would be seen by users


def copies(trial: Trial) -> Iterator[Try]:
    """Pinning, both directions, and what copies cost steps."""
    yield "pinning", functools.partial(_pinning, trial)
    parts = trial.deep_parts()
    yield "a checkpoint beside steps", functools.partial(_checkpoint, trial, parts)
    yield "steps with caches on the host", functools.partial(_offloaded_steps, trial, parts)


def _pinning(trial: Trial) -> Finding:
    """Pin, copy there and back, both at a time, and let go."""
    num_bytes, rows = trial.sizes.copied_bytes, list[Row]()
    started = time.perf_counter()
    memory = PinnedMemory(num_bytes, trial.device)
    rows.append(_row("pin", num_bytes, time.perf_counter() - started))
    streams = streams_of(trial.device)
    there, other = (torch.empty(num_bytes // 2, dtype=torch.uint8, device=trial.device) for _ in range(2))
    half, behind = memory.bytes.split([num_bytes // 2, num_bytes - num_bytes // 2])
    ways: dict[str, list[Callable[[], None]]] = {
        "to the GPU": [lambda: streams.coming.copy(there, half)],
        "to the host": [lambda: streams.going.copy(behind[: len(other)], other)],
    }
    ways["both at a time"] = [each for way in ways.values() for each in way]
    for name, calls in ways.items():
        seconds = []
        for _ in range(3):
            streams.wait_for_copies()
            started = time.perf_counter()
            for call in calls:
                call()
            streams.wait_for_copies()
            seconds.append(time.perf_counter() - started)
        rows.append(_row(name, len(calls) * len(there), min(seconds)))
    started = time.perf_counter()
    memory.release()
    rows.append(_row("unpin", num_bytes, time.perf_counter() - started))
    words = f"{num_bytes / 1e9:.2f} GB are pinned in {rows[0]['seconds']:.2f} s"
    return Finding(passed=True, words=words, rows=rows)


def _row(name: str, num_bytes: int, seconds: float) -> Row:
    return {"what": name, "GB": num_bytes / 1e9, "seconds": seconds, "GB/s": num_bytes / seconds / 1e9}


def _checkpoint(trial: Trial, parts: Parts) -> Finding:
    """Steps alone, and while another thread brings the same cache's positions to the host again and again."""
    length = trial.sizes.checkpoint_length
    target = parts.target(1, length + NUM_STEPS)
    target.arena.buffer.normal_(generator=parts.generator(5))
    cache = target.new_cache(length + NUM_STEPS)
    cache.reserve(length)
    cache.length = length
    alone, is_over, copied = _step_seconds(target, cache), threading.Event(), list[float]()

    def copy_again_and_again() -> None:
        while not is_over.is_set():
            started = time.perf_counter()
            num_bytes = cache.kv(0, length).nbytes
            copied.append(num_bytes / (time.perf_counter() - started) / 1e9)

    thread = threading.Thread(target=copy_again_and_again)
    thread.start()
    beside = _step_seconds(target, cache)
    is_over.set()
    thread.join()
    rows: list[Row] = [
        {"steps": "alone", "ms": 1000 * alone, "GB/s to the host": 0.0},
        {"steps": "beside copies", "ms": 1000 * beside, "GB/s to the host": statistics.mean(copied)},
    ]
    words = f"a step takes {beside / alone:.2f} times as long beside copies of {length:,} positions"
    is_good = beside <= MOST_SLOWER * alone or trial.device.type != "cuda"
    return Finding(passed=is_good, words=words, rows=rows)


def _step_seconds(target: TargetModel, cache: FullKVCache) -> float:
    """The median seconds of steps of one row, each behind the same positions."""
    seconds = []
    for token_id in random_ids(target.vocab_size, NUM_STEPS if target.device.type == "cuda" else 2, 3):
        started = time.perf_counter()
        target.verify([tree_rows(cache, token_id, DraftTree())])
        target.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def offloaded_target(parts: Parts, num_slots: int, longest: int) -> ArenaTarget:
    """The model with caches in the host's memory."""
    arena = OffloadedArena(parts.cache_shape(), num_slots, longest, streams_of(parts.device))
    arena.buffer.zero_()
    forwards = OffloadedForwards(parts.weights, arena, frozenset(), parts.num_splits, parts.kernels, parts.capture)
    return ArenaTarget(forwards, parts.files)


def _offloaded_steps(trial: Trial, parts: Parts) -> Finding:
    """A step whose layers come from the host, against the time of the bytes alone."""
    length = trial.sizes.checkpoint_length
    started = time.perf_counter()
    target = offloaded_target(parts, 1, length + NUM_STEPS)
    cache = target.new_cache(length + NUM_STEPS)
    ready = time.perf_counter() - started
    cache.clear()
    cache.length = length
    seconds, num_bytes = _step_seconds(target, cache), length * parts.cache_shape().bytes_per_position()
    row: Row = {
        "positions": length,
        "GB": num_bytes / 1e9,
        "ms a step": 1000 * seconds,
        "GB/s": num_bytes / seconds / 1e9,
        "seconds to be ready": ready,
    }
    return Finding(passed=True, words=f"{1000 * seconds:.1f} ms a step with caches on the host", rows=[row])


def loading(trial: Trial) -> Iterator[Try]:
    """Weights from files to the device, as workers load them."""
    yield "from files", functools.partial(_loading, trial)


def _loading(trial: Trial) -> Finding:
    rows: list[Row] = []
    for time_of in ("first", "again"):
        started = time.perf_counter()
        weights = dense_weights(trial.files, DTYPES[trial.sizes.dtype], trial.device)
        if trial.device.type == "cuda":
            torch.cuda.synchronize(trial.device)
        seconds = time.perf_counter() - started
        assert weights is not None
        rows.append(_row(time_of, sum(file.stat().st_size for file in trial.files.path.glob("*.safetensors")), seconds))
        del weights
    return Finding(passed=True, words=f"{rows[0]['GB/s']:.2f} GB/s from files in the page cache", rows=rows)
