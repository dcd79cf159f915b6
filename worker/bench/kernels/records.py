"""The figures of the kernels' benchmark, and their table."""

from __future__ import annotations

from rich.console import Group

from swiftbatch.jobs.frozen import Frozen
from swiftbatch.worker.bench.bench_tables import new_table, number
from swiftbatch.worker.bench.kernels.operations import Operation
from swiftbatch.worker.bench.kernels.roof import Roof


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
