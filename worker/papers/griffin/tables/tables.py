"""The figures of GRIFFIN's trainings and arms as tables, and as the plot of its figure 1c.

Tables are those of the paper, and what its latency formula predicts. The plot has misaligned tokens against the number
of the draft forward."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.console import Group
from rich.table import Table

from swiftbatch.worker.bench.bench_tables import new_table
from swiftbatch.worker.papers.griffin.tables.catalogue import MAX_FORWARDS, TEMPERATURES, GriffinTable, Plan
from swiftbatch.worker.papers.griffin.tables.figures import GriffinFigures
from swiftbatch.worker.papers.griffin.tables.variant_trainings import Training

FORMULA_NOTE = (
    "t: plain decoding's forward; t tree: over a tree; t draft: one of d draft levels. The formula is "
    "t / (t + d x t draft) x tau; with t tree, that stands in its denominator."
)
COLOURS, MARKERS = ("#7f7f7f", "#d9730d", "#0b5fa5"), ("s", "^", "o")  # of the rows, told apart without colours too
LINES = ("-", ":")  # of the ways of drawing
NUM_COLUMNS, WIDTH_INCHES, HEIGHT_INCHES, DPI = 2, 5.0, 3.8, 150  # sizes of a panel
HEADROOM = 1.3  # above 100 %, where the legend is


class ArmKey(NamedTuple):
    row: str
    seed: int
    temperature: float
    plan: Plan


@dataclass
class Results:
    trainings: list[Training] = field(default_factory=list)
    figures: dict[ArmKey, GriffinFigures] = field(default_factory=dict)

    def seeds(self) -> list[int]:
        return list(dict.fromkeys(training.seed for training in self.trainings))


def render(table: GriffinTable, results: Results, compared: str) -> Group:
    """The paper's table and what is behind it; `compared` says what the arms were compared over."""
    if table.layout == "forwards":
        return Group(*_forwards(table, results), table.note)
    paper = [_paper(table, results)] if table.layout == "arms" else [_order(table, results), *_orders(table, results)]
    return Group(*paper, table.note, "", _times(results), _formula(results), FORMULA_NOTE, compared)


def summary(key: ArmKey, figures: GriffinFigures) -> str:
    """One arm in a line, as soon as it has run."""
    return (
        f"{key.row}, seed {key.seed}, T = {key.temperature:g}, {key.plan} tree: {figures.tokens_per_step:.2f} tokens a "
        f"step, {figures.ms_per_token:.2f} ms a token, plain decoding {figures.plain_ms_per_token:.2f} "
        f"({figures.speedup:.2f}x)"
    )


def _paper(table: GriffinTable, results: Results) -> Table:
    """Speed-up and accept length of every row: with trees that pay, and with the paper's."""
    headers = [f"T = {t:g}\n{name}" for t in TEMPERATURES for name in ("SR", "tau", "tau of\n60 nodes")]
    rich = new_table(table.title, (table.label_header,), headers)
    [seed] = results.seeds()
    for row in table.rows:
        cells = []
        for t in TEMPERATURES:
            own, paper = (results.figures[ArmKey(row, seed, t, plan)] for plan in table.plans)
            cells += [f"{own.speedup:.2f}x", f"{own.tokens_per_step:.2f}", f"{paper.tokens_per_step:.2f}"]
        rich.add_row(row, *cells)
    return rich


def _times(results: Results) -> Table:
    """Make the table of what a step of each arm consists of."""
    headers = ["T", "tree", "nodes", "d", "t", "t tree", "t draft"]
    rich = new_table("Times of forwards (ms), nodes and draft levels per step", ("arm",), headers)
    for key, arm in results.figures.items():
        counts = f"{arm.nodes_per_step:.1f}", f"{arm.levels_per_step:.1f}"
        times = f"{arm.plain_verify_ms:.2f}", f"{arm.verify_ms:.2f}", f"{arm.level_ms:.2f}"
        rich.add_row(_name(key, results), f"{key.temperature:g}", key.plan, *counts, *times)
    return rich


def _formula(results: Results) -> Table:
    """Equation 14 of the paper beside what was measured."""
    headers = ["T", "tree", "tau", "formula", "with\nt tree", "measured"]
    rich = new_table("Speed-up by the formula of appendix H, and as measured", ("arm",), headers)
    for key, arm in results.figures.items():
        speedups = (arm.predicted_speedup, arm.predicted_tree_speedup, arm.speedup)
        cells = f"{arm.tokens_per_step:.2f}", *(f"{speedup:.2f}x" for speedup in speedups)
        rich.add_row(_name(key, results), f"{key.temperature:g}", key.plan, *cells)
    return rich


def _name(key: ArmKey, results: Results) -> str:
    return key.row if len(results.seeds()) == 1 else f"{key.row}, seed {key.seed}"


def _forwards(table: GriffinTable, results: Results) -> list[Table]:
    """Misaligned rates by way of drawing and row, a table for each kind of text."""
    headers = [f"n = {n}" for n in range(1, MAX_FORWARDS + 1)]
    tables = []
    for records in zip(*(training.accuracy for training in results.trainings), strict=True):
        rich = new_table(f"{table.title}, {records[0].texts}", ("drawn at", table.label_header), headers)
        for way in records[0].misaligned:
            for training, record in zip(results.trainings, records, strict=True):
                rich.add_row(way, training.row, *(f"{rate:.1%}" for rate in record.misaligned[way]))
        tables.append(rich)
    return tables


def _order(table: GriffinTable, results: Results) -> Table:
    """Means over seeds, with the least and the most."""
    temperatures = [f"T = {t:g}" for t in TEMPERATURES]
    headers = [f"{name}\n{t}" for name in ("tau", "accuracy") for t in temperatures]
    rich = new_table(table.title, (table.label_header,), headers)
    for row in table.rows:
        taus = [_spread(_taus(results, row, t), ".2f") for t in TEMPERATURES]
        shares = [_spread(_accuracies(results, row, t), ".1%") for t in TEMPERATURES]
        rich.add_row(row, *taus, *shares)
    return rich


def _orders(table: GriffinTable, results: Results) -> list[str]:
    """Say in words whether rows come out in the paper's order."""
    lines = []
    for t in TEMPERATURES:
        taus = {row: _taus(results, row, t) for row in table.rows}
        num_held = sum(all(a > b for a, b in pairwise(column)) for column in zip(*taus.values(), strict=True))
        by_mean = sorted(taus, key=lambda row: -statistics.mean(taus[row]))
        lines.append(
            f"T = {t:g}: tau falls in the paper's order with {num_held} of {len(results.seeds())} seeds; by its mean: "
            f"{' > '.join(by_mean)}"
        )
    return lines


def _taus(results: Results, row: str, temperature: float) -> list[float]:
    """List the accept lengths, one for each seed."""
    return [
        figures.tokens_per_step
        for key, figures in results.figures.items()
        if key.row == row and key.temperature == temperature
    ]


def _accuracies(results: Results, row: str, temperature: float) -> list[float]:
    """List the accuracies, one for each seed: the mean over forwards and rows of all held-out texts."""
    return [
        statistics.fmean(
            [statistics.fmean(record.same[f"T {temperature:g}"]) for record in training.accuracy],
            [record.num_rows for record in training.accuracy],
        )
        for training in results.trainings
        if training.row == row and training.accuracy
    ]


def _spread(values: list[float], form: str) -> str:
    if not values:
        return "-"
    return f"{statistics.mean(values):{form}}\n{min(values):{form}} to {max(values):{form}}"


def plot(table: GriffinTable, trainings: list[Training], path: Path) -> None:
    """Draw the trainings so far into a PNG file, a panel for each kind of text."""
    texts = list(dict.fromkeys(record.texts for training in trainings for record in training.accuracy))
    num_rows = math.ceil(len(texts) / NUM_COLUMNS)
    size = (WIDTH_INCHES * min(NUM_COLUMNS, len(texts)), HEIGHT_INCHES * num_rows)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    figure.suptitle(table.title, fontsize=11)
    grid = figure.add_gridspec(num_rows, min(NUM_COLUMNS, len(texts)))
    for number, name in enumerate(texts):
        _panel(figure.add_subplot(grid[divmod(number, NUM_COLUMNS)]), name, trainings)
    figure.savefig(path, dpi=DPI, format="png")


def _panel(axes: Axes, texts: str, trainings: list[Training]) -> None:
    """Rates of every training along one kind of text."""
    for training, colour, marker in zip(trainings, COLOURS, MARKERS, strict=False):
        [record] = [record for record in training.accuracy if record.texts == texts]
        for (way, rates), line in zip(record.misaligned.items(), LINES, strict=True):
            forwards = range(1, len(rates) + 1)
            axes.plot(forwards, rates, marker + line, color=colour, label=f"{training.row}, {way}", markersize=4.5)
    axes.set_title(texts, fontsize=10)
    axes.set_xlabel("draft forward n")
    axes.set_ylabel("misaligned tokens")
    axes.set_xticks(range(1, MAX_FORWARDS + 1))
    axes.set_ylim(0, HEADROOM)
    axes.set_yticks([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(framealpha=1.0, edgecolor="white", fontsize=8, loc="upper left", ncols=len(trainings))
