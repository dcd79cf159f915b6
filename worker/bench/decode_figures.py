"""The figures of a decoding benchmark: records and table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Many

from rich.box import SIMPLE_HEAD
from rich.table import Table

from swiftbatch.jobs.frozen_records import Frozen
from swiftbatch.worker.bench.bench_engine import digest
from swiftbatch.worker.bench.decode_contestants import Contestant

BASELINE = "autoregressive"


class DecodeRecord(Frozen):
    """One engine at one position. `speedup` is over `autoregressive` in the same run, None where that did not run."""

    engine: str
    position: int
    temperature: float
    num_tokens: int
    ms_per_token: float  # median over the rounds of the time per step, times steps per token
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float
    speedup: float | None
    tokens_sha256: str  # over the generated ids as little-endian uint32
    num_steps: int
    propose_ms: float  # per step
    verify_ms: float
    commit_ms: float


def make_records(contestants: Many[Contestant], position: int, temperature: float) -> list[DecodeRecord]:
    times = {contestant.name: _ms_per_token(contestant) for contestant in contestants}
    baseline = times.get(BASELINE)
    return [_record(contestant, position, temperature, times[contestant.name], baseline) for contestant in contestants]


def _ms_per_token(contestant: Contestant) -> float:
    timing = contestant.timing
    return 1000 * statistics.median(timing.seconds_per_step) * timing.num_steps / len(contestant.token_ids())


def _record(
    contestant: Contestant, position: int, temperature: float, ms_per_token: float, baseline: float | None
) -> DecodeRecord:
    counters = contestant.counters
    token_ids = contestant.token_ids()
    phases = {f"{name}_ms": 1000 * s / counters.num_steps for name, s in counters.step_seconds.items()}
    return DecodeRecord(
        engine=contestant.name,
        position=position,
        temperature=temperature,
        num_tokens=len(token_ids),
        ms_per_token=ms_per_token,
        num_drafts=counters.num_drafts,
        num_draft_tokens=counters.num_draft_tokens,
        num_accepted_tokens=counters.num_accepted_tokens,
        mean_acceptance_length=counters.mean_acceptance_length,
        speedup=baseline / ms_per_token if baseline else None,
        tokens_sha256=digest(token_ids),
        num_steps=counters.num_steps,
        **phases,
    )


def render(records: Many[DecodeRecord]) -> Table:
    """A table for people; tokens that differ from the baseline's are marked."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("position", justify="right")
    table.add_column("T", justify="right")
    table.add_column("engine", no_wrap=True)
    for header in ("ms per\ntoken", "speed-up", "acceptance\nlength"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("same\ntokens")
    first = {record.position: record.tokens_sha256 for record in reversed(records)}
    for record in records:
        table.add_row(
            str(record.position),
            f"{record.temperature:g}",
            record.engine,
            f"{record.ms_per_token:.2f}",
            "-" if record.speedup is None else f"{record.speedup:.2f}x",
            f"{record.mean_acceptance_length:.2f}",
            "yes" if record.tokens_sha256 == first[record.position] else "no",
        )
    return table
