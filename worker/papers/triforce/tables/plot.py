"""The plot of TriForce's figures 6a and 6b: acceptance rate and speed-up against a size."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from swiftbatch.worker.papers.triforce.tables.catalogue import PromptTable
from swiftbatch.worker.papers.triforce.tables.tables import Results

FULL, MIDDLE, SPEED = "#0b5fa5", "#6fa8d6", "#d9730d"  # also told apart without colours
WIDTH_INCHES, HEIGHT_INCHES, DPI = 7.5, 4.4, 150
HEADROOM = 1.3  # above the highest speed-up, where the legend is


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
