"""The options and figures of a GPU's benchmark, and their tables. Without Triton, which not all machines have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator
from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.tables import new_table, number
from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.run.compute_options import AttentionName, Device, LinearName
from swiftbatch.worker.config import Computation
from swiftbatch.worker.decode_bench import BenchOptions, DecodeRecord, Positions
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS


def _slots(numbers: tuple[int, ...]) -> tuple[int, ...]:
    if not numbers or not all(1 <= each <= NUM_ROWS for each in numbers):
        raise ValueError(f"got {', '.join(map(str, numbers)) or 'none'}; expected 1 to {NUM_ROWS}")
    return tuple(sorted(set(numbers)))


Counts = Annotated[tuple[int, ...], AfterValidator(_slots)]


class GPUBenchOptions(BenchOptions):
    """The measurement asked for: steps and engines behind each of `lengths` that fits, prompts behind nothing, too."""

    device: Device = "cuda"
    draft_model: Path | None = None
    engines: tuple[str, ...]
    lengths: Positions
    slot_counts: Counts
    row_counts: Counts  # of each slot
    num_read: int = Field(ge=1)  # tokens of a prompt that are timed
    num_tokens: int = Field(ge=5)  # of each engine at each length
    attention: AttentionName = Computation.attention
    linear: LinearName = Computation.linear
    text: Path | None = None

    @field_validator("engines")
    @classmethod
    def _known_engines(cls, engines: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in engines if name not in ENGINES]
        if unknown or not engines or len(set(engines)) < len(engines):
            raise ValueError(f"got {', '.join(engines) or 'none'}; expected some of: {', '.join(ENGINES)}, each once")
        return engines


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
