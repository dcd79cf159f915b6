"""The figures of TriForce's arms as tables: those of the paper, and below them what each arm's time went into."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group
from rich.table import Table

from swiftbatch.worker.bench.bench_tables import new_table, number
from swiftbatch.worker.bench.comparisons.arm_generation import PromptFigures
from swiftbatch.worker.papers.triforce.tables.catalogue import PromptTable

Key = tuple[int, str]  # row number and name of an arm
Results = dict[Key, PromptFigures]

RATE = ".3f"


def _speedup(figures: PromptFigures) -> str:
    return f"{figures.speedup:.2f}x"


MEASURES: dict[str, Callable[[PromptFigures], str]] = {
    "acceptance": lambda figures: number(figures.acceptance, RATE),
    "middle_acceptance": lambda figures: number(figures.middle_acceptance, RATE),
    "speedup": _speedup,
    "speedup_and_acceptance": lambda figures: f"{_speedup(figures)} ({number(figures.acceptance, RATE)})",
    "ms_per_token": lambda figures: f"{figures.ms_per_token:.2f}",
    "plain_ms_per_token": lambda figures: f"{figures.plain_ms_per_token:.2f}",
    "needle_share": lambda figures: number(figures.needle_share, ".0%"),
}


def render(table: PromptTable, results: Results) -> Group:
    """The paper's table, speed and counts of each arm, and its time per step."""
    notes = f"{table.note}\n{_compared(results)}"
    return Group(_paper(table, results), _speeds(table, results), _per_step(table, results), notes)


def summary(table: PromptTable, key: Key, figures: PromptFigures) -> str:
    """One arm in a line, as soon as it has run."""
    return (
        f"{arm_name(table, key)}: {figures.ms_per_token:.2f} ms a token, plain decoding "
        f"{figures.plain_ms_per_token:.2f} ({_speedup(figures)}), acceptance {number(figures.acceptance, RATE)}"
    )


def arm_name(table: PromptTable, key: Key) -> str:
    """The row's labels and, where it is not TriForce itself, the arm's own name."""
    row, name = table.rows[key[0]], key[1]
    return " ".join([*row.labels, *([name] if name != "triforce" else [])])


def _paper(table: PromptTable, results: Results) -> Table:
    """Rows and columns of the paper; a dash where a row has no such arm."""
    rich = new_table(table.title, table.label_headers, [column.header for column in table.columns])
    for index, row in enumerate(table.rows):
        cells = [
            MEASURES[column.measure](results[index, column.arm]) if column.arm in row.arms else "-"
            for column in table.columns
        ]
        rich.add_row(*row.labels, *cells)
    return rich


def _speeds(table: PromptTable, results: Results) -> Table:
    headers = ["ms per\ntoken", "plain\nms", "speed-\nup", "tokens", "drafted", "rounds"]
    rich = new_table("Speed, and counts per step of one sequence", ("arm",), headers)
    for key, figures in results.items():
        counts = (figures.tokens_per_step, figures.drafted_per_step, figures.rounds_per_step)
        times = f"{figures.ms_per_token:.2f}", f"{figures.plain_ms_per_token:.2f}", _speedup(figures)
        rich.add_row(arm_name(table, key), *times, *(f"{count:.2f}" for count in counts))
    return rich


def _per_step(table: PromptTable, results: Results) -> Table:
    headers = ["draft\nmodel", "checks", "partial\ncaches", "verify", "commit", "first\nstep"]
    rich = new_table("Time per step (ms), the first one apart", ("arm",), headers)
    for key, figures in results.items():
        draft, step = figures.draft_ms, figures.step_ms
        times = (draft["propose"], draft["check"], draft["follow"], step["verify"], step["commit"])
        rich.add_row(arm_name(table, key), *(f"{ms:.2f}" for ms in times), f"{figures.first_step_ms:,.0f}")
    return rich


def _compared(results: Results) -> str:
    plain = sorted({figures.num_plain_tokens for figures in results.values()})
    tokens = sorted({figures.num_tokens for figures in results.values()})
    return (
        f"{_either(tokens)} tokens with each arm, in turns with plain decoding, which said the same: "
        f"{_either(plain)} tokens, from the same state."
    )


def _either(counts: list[int]) -> str:
    return " or ".join(f"{count:,}" for count in counts)
