"""`python -m bench kernels`: what the compiled kernels make of this machine, operation by operation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pydantic import AfterValidator, Field
from rich.console import Group

from bench.kernel_operations import (
    LARGEST,
    Operation,
    Roof,
    attention_operation,
    forward_operation,
    matrix_operations,
    sampling_operations,
)
from bench.tables import new_table, number
from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.run.compute_options import Device
from swiftbatch.worker.bench_texts import BenchError
from swiftbatch.worker.decode_bench import BenchOptions, check_length
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.compute_threads import ELEMENTS, Team
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes
from swiftbatch.worker.kernels.instruction_sets import chosen_variant, load_library, why_none
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.model.model_files import locate_model

COLOURS, MARKERS = ("#0b5fa5", "#d9730d", "#3a923a", "#8c4fb0", "#7f7f7f"), ("o", "s", "^", "D", "v")
ROOF = "#333333"
WIDTH_INCHES, HEIGHT_INCHES, DPI = 12.0, 5.0, 150


class KernelRecord(Frozen):
    """One operation over so many rows. `allowed_ms`: what this machine would need for its bytes and products alone."""

    name: str
    length: int | None  # positions in the cache
    num_rows: int
    ms: float  # median of the rounds
    num_bytes: int
    num_flops: int
    allowed_ms: float
    torch_ms: float | None  # `transformers`' forward, in turn with ours

    @classmethod
    def of(cls, operation: Operation, seconds: float, torch_seconds: float | None, roof: Roof) -> KernelRecord:
        return cls(
            name=operation.name,
            length=operation.length,
            num_rows=operation.num_rows,
            ms=1000 * seconds,
            num_bytes=operation.num_bytes,
            num_flops=operation.num_flops,
            allowed_ms=1000 * roof.seconds(operation.num_bytes, operation.num_flops, operation.num_bytes_between),
            torch_ms=None if torch_seconds is None else 1000 * torch_seconds,
        )

    @classmethod
    def summed(cls, name: str, parts: list[tuple[KernelRecord, int]]) -> KernelRecord:
        """All these one after the other, each so many times."""

        def total(of: Callable[[KernelRecord], float]) -> float:
            return sum(of(record) * times for record, times in parts)

        return cls(
            name=name,
            length=None,
            num_rows=parts[0][0].num_rows,
            ms=total(lambda record: record.ms),
            num_bytes=int(total(lambda record: record.num_bytes)),
            num_flops=int(total(lambda record: record.num_flops)),
            allowed_ms=total(lambda record: record.allowed_ms),
            torch_ms=None,
        )

    @property
    def gigabytes_per_second(self) -> float:
        return self.num_bytes / self.ms / 1e6

    @property
    def gigaflops_per_second(self) -> float:
        return self.num_flops / self.ms / 1e6


class KernelResult(Frozen):
    """All records, and what they are held against: the best of this machine in the same run, on as many threads."""

    variant: str
    numerics: str
    num_threads: int
    memory_gigabytes_per_second: float  # read from beyond the caches
    gigaflops_per_second: float  # multiplied and added in registers, in the model's dtype
    records: list[KernelRecord]


def render(result: KernelResult) -> Group:
    """Operations, then whole forwards beside `transformers`'."""
    forwards = [record for record in result.records if record.torch_ms is not None]
    title = (
        f"Operations, {result.variant} on {result.num_threads} threads; this machine allows "
        f"{result.memory_gigabytes_per_second:.1f} GB/s of memory and {result.gigaflops_per_second:.0f} GFLOP/s"
    )
    own = new_table(title, ("operation",), ("length", "rows", "ms", "GB/s", "GFLOP/s", "allowed\nms", "of it"))
    for record in result.records:
        if record.torch_ms is None:
            own.add_row(record.name, *_figures(record))
    headers = ("length", "rows", "ms", "GB/s", "GFLOP/s", "allowed\nms", "of it", "torch\nms", "speed-up")
    whole = new_table(f"Whole forwards, numerics {result.numerics}", (), headers)
    for record in forwards:
        assert record.torch_ms is not None
        whole.add_row(*_figures(record), f"{record.torch_ms:.2f}", f"{record.torch_ms / record.ms:.1f}x")
    return Group(own, whole)


def _figures(record: KernelRecord) -> tuple[str, ...]:
    return (
        number(record.length, ","),
        str(record.num_rows),
        f"{record.ms:.3f}",
        f"{record.gigabytes_per_second:.1f}",
        f"{record.gigaflops_per_second:.1f}" if record.num_flops else "-",
        f"{record.allowed_ms:.3f}",
        f"{record.allowed_ms / record.ms:.0%}",
    )


def plot(result: KernelResult, path: Path) -> None:
    """Draw the figures into a PNG file."""
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    figure.suptitle(f"{result.numerics}, {result.num_threads} threads", fontsize=11)
    _forwards(figure.add_subplot(1, 2, 1), [record for record in result.records if record.torch_ms is not None])
    _under_the_roof(figure.add_subplot(1, 2, 2), result)
    figure.savefig(path, dpi=DPI, format="png")


def _forwards(axes: Axes, records: list[KernelRecord]) -> None:
    """Milliseconds over the length, a colour for each number of rows."""
    row_counts = sorted({record.num_rows for record in records})
    for num_rows, colour, marker in zip(row_counts, COLOURS, MARKERS, strict=False):
        own = [record for record in records if record.num_rows == num_rows]
        lengths = [record.length or 0 for record in own]
        for values, line, name in (
            ([record.ms for record in own], "-", "kernels"),
            ([record.torch_ms or 0.0 for record in own], "--", "transformers"),
        ):
            axes.plot(lengths, values, marker + line, color=colour, label=f"{num_rows} rows, {name}", markersize=4.5)
    axes.set_xscale("symlog", linthresh=1000)
    axes.set_yscale("log")
    axes.set_xlabel("positions in the cache")
    axes.set_ylabel("ms")
    axes.set_title("A whole forward", fontsize=10)
    _finish(axes)


def _under_the_roof(axes: Axes, result: KernelResult) -> None:
    """GFLOP/s over operations per byte; what lies above the slope was read from a cache."""
    records = [record for record in result.records if record.num_flops]
    intensity = [_intensity(record) for record in records]
    reach = np.geomspace(min(intensity) / 2, max(intensity) * 2, 50)
    roof = np.minimum(reach * result.memory_gigabytes_per_second, result.gigaflops_per_second)
    axes.plot(reach, roof, color=ROOF, linewidth=1.5, label="memory and multiplications of this machine")
    kinds = ("matrices", "attention", "whole forward")
    for kind, colour, marker in zip(kinds, COLOURS, MARKERS, strict=False):
        alike = [record for record in records if _kind(record) == kind]
        x, y = [_intensity(record) for record in alike], [record.gigaflops_per_second for record in alike]
        axes.plot(x, y, marker, color=colour, label=kind, markersize=5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("floating-point operations per byte")
    axes.set_ylabel("GFLOP/s")
    axes.set_title("Under the roof", fontsize=10)
    _finish(axes)


def _intensity(record: KernelRecord) -> float:
    return record.num_flops / record.num_bytes


def _kind(record: KernelRecord) -> str:
    if record.length is None:
        return "matrices"
    return "attention" if record.torch_ms is None else "whole forward"


def _finish(axes: Axes) -> None:
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(framealpha=1.0, edgecolor="white", fontsize=8)


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
