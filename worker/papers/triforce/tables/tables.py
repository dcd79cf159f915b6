"""The figures of TriForce's arms as tables, those of the paper, and as the plot of its figures 6a and 6b.

Below the paper's tables stands what each arm's time went into. The plot has acceptance rate and speed-up against a
size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from rich.console import Group
from rich.table import Table

from swiftbatch.worker.bench.ablation_arms import PromptFigures
from swiftbatch.worker.bench.bench_tables import new_table, number
from swiftbatch.worker.papers.triforce.tables.catalogue import PromptTable

Key = tuple[int, str]  # row number and name of an arm
Results = dict[Key, PromptFigures]

RATE = ".3f"
FULL, MIDDLE, SPEED = "#0b5fa5", "#6fa8d6", "#d9730d"  # also told apart without colours
WIDTH_INCHES, HEIGHT_INCHES, DPI = 7.5, 4.4, 150
HEADROOM = 1.3  # above the highest speed-up, where the legend is


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


def plot(table: PromptTable, results: Results, path: Path) -> None:
    """Draw the arms that have run so far into a PNG file."""
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    rates = figure.add_subplot()
    speeds = rates.twinx()
    points = [(_size(table, key), figures) for key, figures in results.items()]
    sizes = [size for size, _ in points]
    full = [(size, figures.acceptance) for size, figures in points if figures.acceptance is not None]
    middle = [(size, figures.middle_acceptance) for size, figures in points if figures.middle_acceptance is not None]
    lines = [
        *rates.plot(*_columns(full), "o-", color=FULL, label="acceptance, full verification"),
        *rates.plot(*_columns(middle), "^:", color=MIDDLE, label="acceptance, middle level"),
        *speeds.plot(sizes, [figures.speedup for _, figures in points], "s--", color=SPEED, label="speed-up"),
    ]
    rates.set_title(table.title, fontsize=11)
    rates.set_xlabel(table.label_headers[0])
    rates.set_xscale("log", base=2)
    rates.set_xticks(sizes)
    rates.xaxis.set_minor_locator(NullLocator())
    rates.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _short(size)))
    rates.set_ylabel("acceptance rate")
    rates.set_ylim(0, HEADROOM)
    rates.set_yticks([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    speeds.set_ylabel("speed-up over plain decoding [x]")
    speeds.set_ylim(0, HEADROOM * max(1.0, *(figures.speedup for _, figures in points)))
    rates.grid(color="#dddddd", linewidth=0.7)
    rates.legend(handles=lines, framealpha=1.0, edgecolor="white", fontsize=9, loc="upper left", ncols=3)
    figure.savefig(path, dpi=DPI, format="png")


def _size(table: PromptTable, key: tuple[int, str]) -> int:
    """Return the place of an arm on the x axis."""
    assert table.x_option is not None
    size: int = table.rows[key[0]].arms[key[1]].options[table.x_option]
    return size


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [size for size, _ in points], [rate for _, rate in points]


def _short(size: float) -> str:
    return f"{size / 1024:g}K" if size >= 1024 else f"{size:g}"
