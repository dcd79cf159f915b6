"""The plot of GRIFFIN's figure 1c: misaligned tokens against the number of the draft forward."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from swiftbatch.worker.papers.griffin.tables.catalogue import MAX_FORWARDS, GriffinTable
from swiftbatch.worker.papers.griffin.tables.tree_variants import Training

COLOURS, MARKERS = ("#7f7f7f", "#d9730d", "#0b5fa5"), ("s", "^", "o")  # of the rows, told apart without colours too
LINES = ("-", ":")  # of the ways of drawing
NUM_COLUMNS, WIDTH_INCHES, HEIGHT_INCHES, DPI = 2, 5.0, 3.8, 150  # sizes of a panel
HEADROOM = 1.3  # above 100 %, where the legend is


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
