"""The plot of a long generation: time against length as in the paper's figure 1, rates as in its figure 3."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from swiftbatch.worker.bench.long.long_figures import LongResult

PLAIN, ENGINE, WINDOW, REUSE = "#7f7f7f", "#0b5fa5", "#6fa8d6", "#d9730d"  # also told apart without colours
WIDTH_INCHES, HEIGHT_INCHES, DPI = 11.0, 5.2, 150
HEADROOM = 1.3  # above the highest value, where the legend is


def plot(result: LongResult, title: str, path: Path) -> None:
    """Draw a generation so far into a PNG file; nothing before its first record."""
    if not result.records:
        return
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    figure.suptitle(title, fontsize=11)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.25, 1.0))
    _times(figure.add_subplot(grid[:, 0]), result)
    rates = figure.add_subplot(grid[0, 1])
    _acceptance(rates, result)
    _speedup(figure.add_subplot(grid[1, 1], sharex=rates), result)
    figure.savefig(path, dpi=DPI, format="png")


def _times(axes: Axes, result: LongResult) -> None:
    """Minutes since the first token, for plain decoding and the engine."""
    total = result.records[-1].total
    lengths = [mark.num_tokens for mark in result.marks]
    _line(axes, lengths, [seconds / 60 for seconds in result.plain_seconds], "--", PLAIN, "plain decoding")
    _line(axes, lengths, [mark.seconds / 60 for mark in result.marks], "-", ENGINE, result.engine)
    ends = sorted([(total.plain_seconds / 60, PLAIN), (total.seconds / 60, ENGINE)])
    for (minutes, colour), side in zip(ends, ("top", "bottom"), strict=True):  # the lower label hangs, so none overlap
        text = axes.annotate(f" {minutes:.1f} min", (total.last_token, minutes), va=side, color=colour)
        text.set_fontweight("bold")
    axes.set_title(f"Time to generate: plain decoding takes {total.speedup:.2f}x as long", fontsize=10)
    axes.set_ylabel("time [min]")
    axes.set_xlabel("generated tokens")
    _finish(axes, result)
    axes.set_xlim(0, total.last_token * 1.17)  # room for the labels


def _acceptance(axes: Axes, result: LongResult) -> None:
    """Alpha and beta of every window, and alpha since the start."""
    lengths = [record.num_tokens for record in result.records]
    _line(axes, lengths, [r.total.alpha for r in result.records], "o-", ENGINE, r"$\alpha$ since start")
    _line(axes, lengths, [r.window.alpha for r in result.records], "^:", WINDOW, r"$\alpha$ in window")
    _line(axes, lengths, [r.window.beta for r in result.records], "s--", REUSE, r"$\beta$ in window")
    axes.set_title(r"Accepted of drafted depth: $\alpha$ all, $\beta$ by reused n-grams alone", fontsize=10)
    axes.set_ylabel("acceptance rate")
    _finish(axes, result)


def _speedup(axes: Axes, result: LongResult) -> None:
    """Speed over plain decoding, since the start and in every window."""
    lengths = [record.num_tokens for record in result.records]
    axes.axhline(1.0, color=PLAIN, linestyle="--", linewidth=1.0)
    _line(axes, lengths, [r.total.speedup for r in result.records], "o-", ENGINE, "since start")
    _line(axes, lengths, [r.window.speedup for r in result.records], "^:", WINDOW, "in window")
    axes.set_title("Speed-up over plain decoding", fontsize=10)
    axes.set_ylabel("speed-up [x]")
    axes.set_xlabel("generated tokens")
    _finish(axes, result)


def _line(axes: Axes, lengths: list[int], values: Sequence[float | None], style: str, colour: str, label: str) -> None:
    """One curve over the lengths that have a value."""
    known = [(length, value) for length, value in zip(lengths, values, strict=True) if value is not None]
    if known:
        xs, ys = zip(*known, strict=True)
        axes.plot(xs, ys, style, color=colour, label=label, linewidth=1.8, markersize=5.5)


def _finish(axes: Axes, result: LongResult) -> None:
    """Style the axes as all are: both start at zero, lengths read 20K, quiet frame."""
    axes.set_xlim(0, result.num_tokens * 1.04)
    axes.set_ylim(0, axes.dataLim.y1 * HEADROOM or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: _short(length)))
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(framealpha=1.0, edgecolor="white", fontsize=9, loc="upper left", ncols=3)


def _short(length: float) -> str:
    return f"{length / 1000:g}K" if length >= 1000 else f"{length:g}"
