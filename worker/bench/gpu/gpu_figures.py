"""The figures of a GPU's benchmark, and their tables."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from swiftbatch.jobs.frozen import Frozen
from swiftbatch.worker.bench.bench_tables import new_table, number
from swiftbatch.worker.bench.decode_figures import DecodeRecord


class GPUStepRecord(Frozen):
    """A step of `num_slots` sequences, `num_rows` rows of each. `roofline_ms`: to read its bytes, and nothing else."""

    length: int  # positions in each cache
    num_slots: int
    num_rows: int
    busy_ms: float  # of the GPU
    host_ms: float  # of the whole step, what the GPU is not busy
    num_bytes: int  # weights, keys and values
    roofline_ms: float

    @property
    def roofline_share(self) -> float:
        """1 where the GPU does nothing but read at the speed of its memory."""
        return self.roofline_ms / self.busy_ms


class ReadRecord(Frozen):
    """Known tokens that were read behind `start` positions."""

    start: int
    num_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


class GPUResumeRecord(Frozen):
    """A cache that went to the host and into another slot, without the disk."""

    length: int
    num_bytes: int
    out_seconds: float
    in_seconds: float
    same_bits: bool


class GPUBenchResult(Frozen):
    """All of it. `bytes_per_second`: the memory's, read by a kernel that does nothing else."""

    machine: dict[str, str]
    bytes_per_second: float
    steps: list[GPUStepRecord]
    reads: list[ReadRecord]
    resume: GPUResumeRecord
    engines: list[DecodeRecord]
    left_out: list[str]  # engines, each with the reason
    memory: dict[str, int]  # bytes


def render(result: GPUBenchResult) -> Group:
    """Steps, reading, resume, engines, memory."""
    parts = [_steps(result), _reads(result), _resume(result.resume), _engines(result)]
    left_out = [Text(f"left out: {each}") for each in result.left_out]
    return Group(*parts, *left_out, _memory(result.memory))


def _steps(result: GPUBenchResult) -> Table:
    device = result.machine["device"]
    title = f"Steps on {device}, which reads {result.bytes_per_second / 1e9:,.1f} GB/s"
    table = new_table(title, (), ("length", "slots", "rows", "busy\nms", "host\nms", "GB", "roofline\nms", "of it"))
    for step in result.steps:
        table.add_row(
            f"{step.length:,}",
            str(step.num_slots),
            str(step.num_rows),
            number(step.busy_ms),
            number(step.host_ms),
            number(step.num_bytes / 1e9),
            number(step.roofline_ms),
            f"{step.roofline_share:.0%}",
        )
    return table


def _reads(result: GPUBenchResult) -> Table:
    table = new_table("Reading of prompts and replayed tokens", (), ("behind", "tokens", "seconds", "tokens/s"))
    for read in result.reads:
        figures = (number(read.seconds), number(read.tokens_per_second, ",.0f"))
        table.add_row(f"{read.start:,}", f"{read.num_tokens:,}", *figures)
    return table


def _resume(resume: GPUResumeRecord) -> Table:
    headers = ("length", "GB", "out, s", "GB/s", "in, s", "GB/s", "same bits")
    table = new_table("A cache out of one slot and into another", (), headers)
    gigabytes = resume.num_bytes / 1e9
    times = (cell for s in (resume.out_seconds, resume.in_seconds) for cell in (number(s), number(gigabytes / s)))
    table.add_row(f"{resume.length:,}", number(gigabytes), *times, "yes" if resume.same_bits else "NO")
    return table


def _engines(result: GPUBenchResult) -> Table:
    headers = ("position", "tokens/s", "speed-up", "tokens\na step", "verify\nms", "propose\nms", "same\ntokens")
    table = new_table("Engines, one sequence", ("engine",), headers)
    first = {record.position: record.tokens_sha256 for record in reversed(result.engines)}
    for record in result.engines:
        table.add_row(
            record.engine,
            f"{record.position:,}",
            number(1000 / record.ms_per_token, ",.1f"),
            "-" if record.speedup is None else f"{record.speedup:.2f}x",
            number(record.mean_acceptance_length),
            number(record.verify_ms),
            number(record.propose_ms),
            "yes" if record.tokens_sha256 == first[record.position] else "NO",
        )
    return table


def _memory(memory: dict[str, int]) -> Table:
    table = new_table("Memory", ("of",), ("GB",))
    for name, num_bytes in memory.items():
        table.add_row(name, number(num_bytes / 1e9))
    return table
