"""Plot of a training, from the records of its log."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

WIDTH_INCHES, HEIGHT_INCHES, DPI = 5.5, 4.2, 150
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))  # distinct without colours
SMOOTHING = 0.9  # weight of the past in the running mean of losses

Curves = dict[str, list[tuple[int, float]]]
"""Points (step, value) by label."""


def plot_training(records: list[dict[str, Any]], path: Path) -> None:
    """Plot losses, and accuracies if they were measured during or around the training, as a PNG file."""
    losses, shares = loss_curves(records), share_curves(records)
    panels = 2 if shares else 1
    figure = Figure(figsize=(panels * WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    FigureCanvasAgg(figure)  # needs no display
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _draw(axes[0], {label: _smoothed(points) for label, points in losses.items()}, "Loss, smoothed")
    weight = records[0].get("recipe", {}).get("feature_weight")
    axes[0].set_ylabel("nats per token" if weight is None else f"nats per token + {weight:g} x L1 of features")
    if shares:
        measured = next(record["texts"] for record in records if _shares(record))
        _draw(axes[1], shares, f"Share of rows with the target's token, {measured}")
        axes[1].yaxis.set_major_formatter(PercentFormatter(1.0))
        axes[1].set_ylim(0.0, 1.0)
    figure.savefig(path, dpi=DPI, format="png")


def loss_curves(records: list[dict[str, Any]]) -> Curves:
    """Return each kind's loss, or each pass's or head's."""
    curves: Curves = defaultdict(list)
    for record in records:
        name = "pass" if "aligned" in record else "head"
        for number, loss in enumerate(record.get("losses", []), start=1):
            curves[f"{name} {number}"].append((record["step"], loss))
        if "loss" in record:
            curves[record["kind"]].append((record["step"], record["loss"]))
    return dict(curves)


def share_curves(records: list[dict[str, Any]]) -> Curves:
    """Return the accuracies along the first texts that were measured, if there are two points or more."""
    measured = [record for record in records if _shares(record)]
    last = max((record.get("step", 0) for record in records), default=0)
    curves: Curves = defaultdict(list)
    for record in measured:
        if record["texts"] == measured[0]["texts"]:
            step = record.get("step", 0 if record["when"] == "before" else last)
            for label, share in _shares(record).items():
                curves[label].append((step, share))
    return {label: points for label, points in curves.items() if len(points) > 1}


def _shares(record: dict[str, Any]) -> dict[str, float]:
    """Return the shares of an accuracy record of any training by label."""
    if "top" in record:
        return {f"head {number}": share for number, (share, *_) in enumerate(record["top"], start=1)}
    same = record.get("same", {})
    if isinstance(same, list):
        return {f"pass {number}": share for number, share in enumerate(same, start=1)}
    forwards = same.get("T 1")
    if isinstance(forwards, list):
        return {f"forward {number}, T 1": share for number, share in enumerate(forwards, start=1)}
    return dict(same)


def _smoothed(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    mean, smoothed = points[0][1], []
    for step, value in points:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        smoothed.append((step, mean))
    return smoothed


def _draw(axes: Axes, curves: Curves, title: str) -> None:
    for number, (label, points) in enumerate(curves.items()):
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, linestyle=STYLES[number % len(STYLES)], linewidth=1.6, label=label)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step")
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if curves:
        axes.legend(framealpha=1.0, edgecolor="white", fontsize=9, ncols=2)
