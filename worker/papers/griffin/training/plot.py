"""The plot of a GRIFFIN training: the loss of each pass, and how often each forward of a draft is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

WIDTH_INCHES, HEIGHT_INCHES, DPI = 11.0, 4.2, 150
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))  # of the passes and forwards: told apart without colours
SMOOTHING = 0.9  # running mean of the losses: a step's windows differ much


def plot_training(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the records of a training log into a PNG file."""
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    losses, accuracy = figure.subplots(1, 2)
    _losses(losses, [record for record in records if "losses" in record])
    _accuracy(accuracy, [record for record in records if "same" in record])
    figure.savefig(path, dpi=DPI, format="png")


def _losses(axes: Axes, steps: list[dict[str, Any]]) -> None:
    """Loss of every pass, smoothed, over the steps that had it."""
    for number in range(max(len(step["losses"]) for step in steps)):
        known = [(step["step"], step["losses"][number]) for step in steps if number < len(step["losses"])]
        means = [known[0][1]]
        for _, loss in known[1:]:
            means.append(SMOOTHING * means[-1] + (1 - SMOOTHING) * loss)
        _line(axes, number, [step for step, _ in known], means, f"pass {number + 1}")
    axes.set_title("Loss of each pass over its aligned rows", fontsize=10)
    axes.set_ylabel("loss [nats and 0.1 x L1]")
    _finish(axes)


def _accuracy(axes: Axes, records: list[dict[str, Any]]) -> None:
    """Share of the target's tokens by forward along what is measured most often, with the noise at T = 1."""
    measured = [record for record in records if record["texts"] == records[0]["texts"]]
    for forward in range(len(measured[0]["same"]["T 1"]) if measured else 0):
        shares = [record["same"]["T 1"][forward] for record in measured]
        _line(axes, forward, [record["step"] for record in measured], shares, f"forward {forward + 1}")
    name = f", {measured[0]['texts']}" if measured else ""
    axes.set_title(f"The target's token, T = 1 with its noise{name}", fontsize=10)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0.0, 1.0)
    _finish(axes)


def _line(axes: Axes, number: int, steps: list[int], values: list[float], label: str) -> None:
    axes.plot(steps, values, linestyle=STYLES[number % len(STYLES)], linewidth=1.6, label=label)


def _finish(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(framealpha=1.0, edgecolor="white", fontsize=9, ncols=2)
