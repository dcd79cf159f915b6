"""`python -m bench gpu`: a GPU's speed and memory with a model."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence

import torch

from bench.options import GPUOptions as Options
from bench.peak_memory import peak_bytes, reset_peak
from bench.tables import Record
from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker import decode_bench
from swiftbatch.worker.decode_bench import BenchError, DecodeBenchOptions, decode_records
from swiftbatch.worker.drafters.catalogue import check_parts
from swiftbatch.worker.exactness.gpu_doctor.machine_checks import device_facts, read_bandwidth
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import ArenaTarget, Parts
from swiftbatch.worker.forward.step_costs import Clock
from swiftbatch.worker.forward.tile_packing import SequenceRows, max_tree_depth, tree_rows
from swiftbatch.worker.kernels.cuda.cuda_graph import Graph, Repeated, Work, capture
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.gpu_memory_plan import GPUMemory, one_slot
from swiftbatch.worker.kv.kv_capacity import GB, GPU_PAGE, MEMORY, KVRoom
from swiftbatch.worker.kv.model_sizes import ModelSizes, read_sizes
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree

PIECE = 1024  # positions per checkpoint segment
NUM_CACHES = 2  # an engine has a job's and the warm-up's; a resume also has two


def measured(parts: Parts, options: Options) -> Iterator[Record]:
    """Yield all figures. Raises BenchError without room."""
    meter = MemoryMeter(parts.device)
    if parts.loaded is None:
        raise BenchError(f"model {options.model}: the kernels do not know this kind, expected one of docs/kernels.md")
    bandwidth = read_bandwidth(parts)
    yield device_facts(parts.device) | {"memory_GB/s": bandwidth / 1e9}
    yield meter.note("weights")
    parts.forget_unused()
    fitting = _fitting(parts, options)
    yield from step_records(parts, {slots: fitting[slots] for slots in options.slots}, options.rows, bandwidth)
    yield meter.note("steps")
    yield from read_records(parts, [0, *fitting[1][1:]], options.num_read)
    yield resume_record(parts, fitting[NUM_CACHES][-1])
    engines = []
    for name in options.engines:
        try:
            check_parts(name, str(parts.files.path), parts.files.fingerprint, options.draft_model)
            engines.append(name)
        except ModelError as error:
            yield {"words": f"left out: {error}"}
    first: dict[int, str] = {}
    for record in _engine_records(parts, options, engines, fitting[NUM_CACHES]):
        digest = first.setdefault(record["position"], record["tokens_sha256"])
        names = ("engine", "position", "speedup", "mean_acceptance_length", "verify_ms", "propose_ms", "tokens_sha256")
        speed = {"tokens/s": 1000 / record["ms_per_token"], "same_tokens": record["tokens_sha256"] == digest}
        yield {name: record[name] for name in names} | speed
    yield meter.note("engines")


def _fitting(parts: Parts, options: Options) -> dict[int, list[int]]:
    """Raises BenchError."""
    sizes = read_sizes(parts.files, options.dtype)
    assert sizes is not None
    kernels = parts.kernels
    gpu = GPUMemory(free_bytes(parts.device) + sizes.weight_bytes, kernels.attention, kernels.num_rows)
    num_behind = max(options.num_tokens, options.num_read, *options.rows)
    lengths = sorted(length for length in options.lengths if length + num_behind <= parts.files.max_positions)
    counts = sorted({1, NUM_CACHES, *options.slots})
    fitting = {num_slots: fitting_lengths(sizes, gpu, lengths, num_behind, num_slots) for num_slots in counts}
    if not fitting[NUM_CACHES]:
        raise BenchError(
            f"{NUM_CACHES} caches of {min(options.lengths):,} + {num_behind:,} positions: the model has "
            f"{parts.files.max_positions:,} positions, {gpu.free_bytes / GB:,.1f} GB are free without its weights"
        )
    return fitting


def _engine_records(parts: Parts, options: Options, engines: list[str], lengths: list[int]) -> Iterator[Record]:
    decode = DecodeBenchOptions(
        engines=tuple(engines),
        positions=tuple(lengths),
        draft_model=options.draft_model,
        num_tokens=options.num_tokens,
        text=options.text,
        temperature=1.0,
        min_p=0.1,
        repetition_penalty=1.0,
        seed=0,
    )
    warm_up = min(decode_bench.NUM_WARMUP_TOKENS, parts.files.max_positions // 2)
    target = parts.target(NUM_CACHES, max(lengths[-1] + options.num_tokens, warm_up))
    return decode_records(target, decode, print)


class Stopwatch:
    """A `Capture` that times every replay and waits for it."""

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
) -> Iterator[Record]:
    for num_slots, lengths in fitting.items():
        if not lengths:
            continue
        stopwatch = Stopwatch(Clock(parts.device))
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
) -> Record:
    """`place` is length and rows of each slot."""
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
    return {
        "length": length,
        "num_slots": len(caches),
        "num_rows": num_rows,  # per slot
        "busy_ms": 1000 * busy_seconds,  # the GPU's
        "host_ms": 1000 * (whole_seconds - busy_seconds),
        "GB": num_bytes / 1e9,  # weights, keys and values
        "roofline_ms": 1000 * num_bytes / bandwidth,  # only reading them
        "of_roofline": num_bytes / bandwidth / busy_seconds,
    }


def step_bytes(parts: Parts, length: int, num_slots: int) -> int:
    """Count the bytes that a step reads."""
    return parts.weights.product_bytes + num_slots * length * parts.cache_shape().bytes_per_position()


def _groups(caches: list[FullKVCache], length: int, num_rows: int, vocab_size: int, seed: int) -> list[SequenceRows]:
    rng, groups = random.Random(seed), []
    for cache in caches:
        cache.length = length
        num_nodes = num_rows - 1 if max_tree_depth(length) else 0
        tree = DraftTree(rng.sample(range(vocab_size), num_nodes), [ROOT] * num_nodes)
        groups.append(tree_rows(cache, rng.randrange(vocab_size), tree))
    return groups


def read_records(parts: Parts, starts: Sequence[int], num_tokens: int) -> Iterator[Record]:
    """Time reading known tokens after caches of these lengths."""
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
        seconds = time.perf_counter() - started
        yield {"behind": start, "num_read": num_tokens, "seconds": seconds, "tokens/s": num_tokens / seconds}


def resume_record(parts: Parts, length: int) -> Record:
    """Time copying a slot's keys and values to the host and into another slot."""
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
    return {
        "resumed_length": length,
        "GB": length * parts.cache_shape().bytes_per_position() / 1e9,
        "out_seconds": out_seconds,
        "in_seconds": in_seconds,
        "same_bits": _same_bits(cache, resumed, length),
    }


def _same_bits(ours: FullKVCache, theirs: FullKVCache, length: int) -> bool:
    """Compare layer by layer, in little memory."""
    whole = torch.int16 if ours.shape.row_dtype.itemsize == 2 else torch.int32
    return all(
        torch.equal(a.view(whole), b.view(whole))
        for layer in range(ours.shape.num_layers)
        for a, b in zip(*(cache.stored_between(layer, slice(0, length)) for cache in (ours, theirs)), strict=True)
    )


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(KVRoom(MEMORY, 1).free_bytes())


def fitting_lengths(
    sizes: ModelSizes, gpu: GPUMemory, lengths: list[int], num_behind: int, num_slots: int
) -> list[int]:
    """Return the lengths that fit so many slots."""
    behind = num_behind + GPU_PAGE  # part of the last page stays empty
    return [length for length in lengths if one_slot(sizes, gpu, length + behind).num_fitting >= num_slots]


class MemoryMeter:
    """The most bytes held in each stage."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reset()

    def note(self, stage: str) -> Record:
        """Return the peak since the last stage."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            reserved = torch.cuda.memory_reserved(self._device)
            outside = total - free - reserved  # context, library buffers, other processes
            most = outside + torch.cuda.max_memory_reserved(self._device)
        else:
            most = peak_bytes()
        self._reset()
        return {"memory of": stage, "GB at most": most / 1e9}

    def _reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            reset_peak()
