"""The figures of the kernels' benchmark: their table, and their plot.

The plot has forwards over length, and each operation under the machine's roof."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Group

from swiftbatch.jobs.frozen_records import Frozen
from swiftbatch.worker.bench.bench_tables import new_table, number
from swiftbatch.worker.bench.kernels.operations import Operation
from swiftbatch.worker.bench.kernels.roofline import Roof

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
