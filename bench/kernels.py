"""Times the compiled kernels, operation by operation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from bench.kernel_operations import (
    LARGEST,
    Operation,
    Roof,
    attention_operation,
    forward_operation,
    matrix_operations,
    sampling_operations,
)
from bench.options import Ints, Names, one_of
from bench.tables import Record, only
from swiftbatch.jobs.run.run_records import Device
from swiftbatch.worker.decode_bench import BenchError, BenchOptions, check_length
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes
from swiftbatch.worker.kernels.native_library import Team, chosen_variant, load_library, why_none
from swiftbatch.worker.kernels.native_weights import ELEMENTS
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.model.model_files import locate_model

# published models, measured with zero weights
SHAPES = {  # num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072, 151_936),
    "llama-3.1-8b": (32, 4096, 32, 8, 128, 14_336, 128_256),
}
LEAST_SECONDS = 0.002  # least seconds per round: shorter calls are repeated
SUMMED = ("ms", "num_bytes", "num_flops", "allowed_ms")
COLUMNS = (
    *("variant", "num_threads", "memory_GB/s", "multiply_GFLOP/s"),
    *("name", "length", "num_rows", "ms", "GB/s", "GFLOP/s", "allowed_ms", "of_allowed", "torch_ms", "speedup"),
)


class Options(BenchOptions):
    """Options; forwards over each of `rows` after each of `lengths`, on CPUs."""

    device: Device = "cpu"
    lengths: Ints = (0, 2048, 20_480, 102_400)  # positions in the cache
    rows: Ints = (1, 8, 32)  # per forward
    num_rounds: int = 7  # the median counts
    shapes: Names = ()  # names in `SHAPES` of other models to time


def run(options: Options) -> Iterator[Record]:
    """Time the compiled CPU kernels against this machine's limits, and whole forwards against transformers'.

    The same run measures the limits of memory and multiplications on as many threads. SWIFTBATCH_ISA selects another
    instruction set than the fastest.

    \b
    Example:
      python -m bench kernels --rows 1,8 --json kernels.jsonl
    """
    if (variant := chosen_variant()) is None:
        raise BenchError(f"no kernels to measure: {why_none()}")
    files = locate_model(options.model)
    check_length(files, max(options.lengths), max(options.rows))
    target = options.load(files)
    forwards = target.forwards
    if not isinstance(forwards, NativeForwards):
        raise BenchError(f"model {options.model}: the kernels do not know this kind, expected one of docs/kernels.md")
    team = Team(load_library(variant), options.num_threads)
    roof = Roof(team.library, ELEMENTS[target.dtype], options.num_threads)
    limits = {"memory_GB/s": roof.bytes_per_second(LARGEST) / 1e9, "multiply_GFLOP/s": roof.flops_per_second / 1e9}
    yield {"variant": variant, "numerics": forwards.numerics, "num_threads": options.num_threads} | limits
    wholes = dict[tuple[str, int], list[tuple[Record, int]]]()
    for operation in _operations(options, target, forwards.sizes, team):
        record = _measured(operation, options.num_rounds, roof)
        yield record
        if operation.whole is not None:
            wholes.setdefault((operation.whole, operation.num_rows), []).append((record, operation.times))
    complete = max(map(len, wholes.values()), default=0)  # some depths are not divisible into groups
    for (name, num_rows), parts in wholes.items():
        if len(parts) == complete:  # a model's matrices in one form together
            summed = {field: sum(record[field] * times for record, times in parts) for field in SUMMED}
            yield _figures({"name": name, "length": None, "num_rows": num_rows} | summed)


def shown(records: list[Record], options: Options) -> list[Record]:
    return only(records, COLUMNS)


def _figures(record: Record) -> Record:
    return record | {
        "GB/s": record["num_bytes"] / record["ms"] / 1e6,
        "GFLOP/s": record["num_flops"] / record["ms"] / 1e6,
        "of_allowed": record["allowed_ms"] / record["ms"],
    }


def _operations(options: Options, target: TargetModel, sizes: DecoderSizes, team: Team) -> Iterator[Operation]:
    yield from matrix_operations(sizes, team, options.rows)
    for name in options.shapes:
        yield from matrix_operations(sizes_named(name, sizes.dtype), team, options.rows, f"{name} ")
    yield from sampling_operations(sizes.vocab, options.rows)
    cache = _full_cache(target, options)
    for length in options.lengths:
        for num_rows in options.rows:
            yield attention_operation(sizes, team, cache.prefix(length), num_rows)
    in_torch = TargetModel(target.transformers, target.files)
    for length in options.lengths:
        for num_rows in options.rows:
            yield forward_operation(sizes, target, in_torch, cache.prefix(length), num_rows)


def _full_cache(target: TargetModel, options: Options) -> FullKVCache:
    cache = target.new_cache(max(options.lengths) + max(options.rows))
    cache.clear()
    cache.advance(max(options.lengths))
    return cache


def _measured(operation: Operation, num_rounds: int, roof: Roof) -> Record:
    """Return medians, ours and torch's in turn, and the machine's limit."""
    calls = [call for call in (operation.call, operation.in_torch) if call is not None]
    first = [min(_seconds(call, 1) for _ in range(2)) for call in calls]
    num_calls = [max(1, round(LEAST_SECONDS / seconds)) for seconds in first]
    rounds = [[_seconds(call, count) for call, count in zip(calls, num_calls, strict=True)] for _ in range(num_rounds)]
    own, *others = (1000 * statistics.median(times) for times in zip(*rounds, strict=True))
    allowed = roof.seconds(operation.num_bytes, operation.num_flops, operation.num_bytes_between)
    place = {"name": operation.name, "length": operation.length, "num_rows": operation.num_rows, "ms": own}
    costs = {"num_bytes": operation.num_bytes, "num_flops": operation.num_flops, "allowed_ms": 1000 * allowed}
    in_torch = {"torch_ms": others[0], "speedup": others[0] / own} if others else {}
    return _figures(place | costs) | in_torch


def _seconds(call: Callable[[], object], num_calls: int) -> float:
    started = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - started) / num_calls


def sizes_named(name: str, dtype: torch.dtype) -> DecoderSizes:
    counts = one_of(SHAPES, name)
    return DecoderSizes(*counts, epsilon=1e-6, scale=counts[4] ** -0.5, dtype=dtype)
