"""The figures of a long generation as tables for people."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from swiftbatch.worker.bench.bench_tables import new_table, number
from swiftbatch.worker.bench.long.records import LongFigures, LongResult

RATES = ("speed-up", "alpha", "beta", "tokens\nper step")


def render(result: LongResult) -> Group:
    """Since the start, in each window, per step, and in words."""
    return Group(_since_start(result), _in_windows(result), _per_step(result), _summary(result))


def _since_start(result: LongResult) -> Table:
    distinct = (f"dist\n{n}" for n in range(1, 5))
    table = new_table("Since the start", (), ("tokens", "min", "plain\nmin", *RATES, *distinct))
    for record in result.records:
        total = record.total
        times = (f"{record.num_tokens:,}", f"{total.seconds / 60:.2f}", f"{total.plain_seconds / 60:.2f}")
        table.add_row(*times, *_rates(total), *(f"{value:.2f}" for value in record.distinct.values()))
    return table


def _in_windows(result: LongResult) -> Table:
    table = new_table("In each window", (), ("up to", "ms per\ntoken", "plain\nms", *RATES))
    for record in result.records:
        window = record.window
        times = (f"{record.num_tokens:,}", f"{window.ms_per_token:.2f}", f"{window.plain_ms_per_token:.2f}")
        table.add_row(*times, *_rates(window))
    return table


def _per_step(result: LongResult) -> Table:
    """Make the table of what a step of a window consists of; behind proposing, its own parts."""
    first = result.records[0].window
    phases = (*(f"{name}\nms" for name in first.step_ms), *(f"draft:\n{name}" for name in first.draft_ms))
    table = new_table("Per step", (), ("up to", "draft\ndepth", "rounds", *phases))
    for record in result.records:
        window = record.window
        counts = (f"{record.num_tokens:,}", f"{window.mean_draft_depth:.2f}", f"{window.rounds_per_step:.2f}")
        table.add_row(*counts, *(f"{ms:.2f}" for ms in (*window.step_ms.values(), *window.draft_ms.values())))
    return table


def _rates(figures: LongFigures) -> tuple[str, ...]:
    length = f"{figures.tokens_per_step:.2f}"
    return f"{figures.speedup:.2f}x", number(figures.alpha), number(figures.beta), length


def _summary(result: LongResult) -> str:
    total = result.records[-1].total
    compared = [window.same_tokens for window in result.plain_windows if window.same_tokens is not None]
    return (
        f"{result.num_tokens:,} tokens in {total.seconds / 60:.1f} minutes; plain decoding: "
        f"{total.plain_seconds / 60:.1f} minutes ({total.speedup:.2f}x), "
        f"with the same tokens in {sum(compared)} of {len(compared)} windows"
    )
