"""`swiftbatch bench kernels`: what the compiled kernels make of this machine, operation by operation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
from pydantic import AfterValidator, Field

from swiftbatch.jobs.run.option_values import Device
from swiftbatch.worker.bench.bench_engine import BenchError
from swiftbatch.worker.bench.bench_options import BenchOptions, check_length
from swiftbatch.worker.bench.kernels.kernel_figures import KernelRecord, KernelResult, plot
from swiftbatch.worker.bench.kernels.operations import (
    Operation,
    attention_operation,
    forward_operation,
    matrix_operations,
    sampling_operations,
)
from swiftbatch.worker.bench.kernels.roofline import LARGEST, Roof
from swiftbatch.worker.caches.full_cache import FullKVCache
from swiftbatch.worker.kernels.compute_threads import ELEMENTS, Team
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes
from swiftbatch.worker.kernels.instruction_sets import chosen_variant, load_library, why_none
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.target.native_forwards import NativeForwards
from swiftbatch.worker.target.target import TargetModel

# published models, measured with weights of zeros: no weights need to be there
SHAPES = {  # num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072, 151_936),
    "llama-3.1-8b": (32, 4096, 32, 8, 128, 14_336, 128_256),
}

LEAST_SECONDS = 0.002  # least seconds of a round: a shorter call is repeated


def _ascending_in(numbers: tuple[int, ...], bounds: range) -> tuple[int, ...]:
    if not numbers or any(each not in bounds for each in numbers):
        what = f"{bounds.start} to {bounds[-1]}" + (f", multiples of {bounds.step}" if bounds.step > 1 else "")
        raise ValueError(f"got {', '.join(map(str, numbers)) or 'none'}; expected {what}")
    return tuple(sorted(set(numbers)))


def _known_shapes(names: tuple[str, ...]) -> tuple[str, ...]:
    if strange := [name for name in names if name not in SHAPES]:
        raise ValueError(f"got {', '.join(strange)}; expected some of {', '.join(SHAPES)}")
    return names


class KernelBenchOptions(BenchOptions):
    """The measurement asked for: forwards over each of `row_counts` behind each of `lengths`."""

    device: Device = "cpu"
    lengths: Annotated[tuple[int, ...], AfterValidator(lambda found: _ascending_in(found, range(0, 2**21, BLOCK)))]
    row_counts: Annotated[tuple[int, ...], AfterValidator(lambda found: _ascending_in(found, range(1, BLOCK + 1)))]
    num_rounds: int = Field(ge=1)
    shapes: Annotated[tuple[str, ...], AfterValidator(_known_shapes)] = ()  # of other models, whose matrices are timed
    plot_path: Path | None = None


def run_kernel_bench(options: KernelBenchOptions, report: Callable[[str], None] = lambda line: None) -> KernelResult:
    """Measure; `report` gets a line about each stage. Raises BenchError, ModelError, KernelError, KVRoomError."""
    if (variant := chosen_variant()) is None:
        raise BenchError(f"no kernels to measure: {why_none()}")
    files = locate_model(options.model)
    check_length(files, options.lengths[-1], options.row_counts[-1])
    target = options.load(files)
    forwards = target.forwards
    if not isinstance(forwards, NativeForwards):
        raise BenchError(f"model {options.model}: the kernels do not know this kind, expected one of docs/kernels.md")
    report(f"{variant} on {options.num_threads} threads: memory and multiplications by themselves")
    team = Team(load_library(variant), options.num_threads)
    roof = Roof(team.library, ELEMENTS[target.dtype], options.num_threads)
    records = _measured_all(_operations(options, target, forwards.sizes, team, report), options.num_rounds, roof)
    result = KernelResult(
        variant=variant,
        numerics=forwards.numerics,
        num_threads=options.num_threads,
        memory_gigabytes_per_second=roof.bytes_per_second(LARGEST) / 1e9,
        gigaflops_per_second=roof.flops_per_second / 1e9,
        records=records,
    )
    options.write(result.model_dump(), target)
    if options.plot_path is not None:
        plot(result, options.plot_path)
    return result


def _measured_all(operations: Iterator[Operation], num_rounds: int, roof: Roof) -> list[KernelRecord]:
    """All of them, and behind them the matrices of each model in each form together."""
    records, wholes = [], dict[tuple[str, int], list[tuple[KernelRecord, int]]]()
    for operation in operations:
        records.append(_measured(operation, num_rounds, roof))
        if operation.whole is not None:
            parts = wholes.setdefault((operation.whole, operation.num_rows), [])
            parts.append((records[-1], operation.times))
    complete = max(map(len, wholes.values()), default=0)  # some depths are no whole groups of a form
    return records + [KernelRecord.summed(name, own) for (name, _), own in wholes.items() if len(own) == complete]


def _operations(
    options: KernelBenchOptions, target: TargetModel, sizes: DecoderSizes, team: Team, report: Callable[[str], None]
) -> Iterator[Operation]:
    report("matrices and sampling")
    yield from matrix_operations(sizes, team, options.row_counts)
    for name in options.shapes:
        report(f"matrices in the shapes of {name}")
        yield from matrix_operations(sizes_named(name, sizes.dtype), team, options.row_counts, f"{name} ")
    yield from sampling_operations(sizes.vocab, options.row_counts)
    cache = _full_cache(target, options)
    for length in options.lengths:
        report(f"attention behind {length:,} positions")
        for num_rows in options.row_counts:
            yield attention_operation(sizes, team, cache.prefix(length), num_rows)
    in_torch = TargetModel(target.transformers, target.files)
    for length in options.lengths:
        report(f"whole forwards behind {length:,} positions, ours and those of transformers in turn")
        for num_rows in options.row_counts:
            yield forward_operation(sizes, target, in_torch, cache.prefix(length), num_rows)


def _full_cache(target: TargetModel, options: KernelBenchOptions) -> FullKVCache:
    """A cache of zeros for all lengths."""
    cache = target.new_cache(options.lengths[-1] + options.row_counts[-1])
    cache.clear()
    cache.advance(options.lengths[-1])
    return cache


def _measured(operation: Operation, num_rounds: int, roof: Roof) -> KernelRecord:
    """Medians of rounds, ours and torch's in turn, so that a busy moment of the machine hits both."""
    calls = [call for call in (operation.call, operation.in_torch) if call is not None]
    first = [min(_seconds(call, 1) for _ in range(2)) for call in calls]
    num_calls = [max(1, round(LEAST_SECONDS / seconds)) for seconds in first]
    rounds = [[_seconds(call, count) for call, count in zip(calls, num_calls, strict=True)] for _ in range(num_rounds)]
    own, *others = (statistics.median(times) for times in zip(*rounds, strict=True))
    return KernelRecord.of(operation, own, others[0] if others else None, roof)


def _seconds(call: Callable[[], object], num_calls: int) -> float:
    """Time one of these calls."""
    started = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - started) / num_calls


def sizes_named(name: str, dtype: torch.dtype) -> DecoderSizes:
    """The sizes of a decoder of that name."""
    counts = SHAPES[name]
    return DecoderSizes(*counts, epsilon=1e-6, scale=counts[4] ** -0.5, dtype=dtype)
