"""The charts of a report."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from swiftbatch.metrics.report.attempts import Attempt, Intervals
from swiftbatch.metrics.report.page_text import clock, ticks
from swiftbatch.metrics.report.run_facts import LongAttempt, RunFacts

Column = NDArray[np.float64]

MAX_TIME_BINS = 120
MIN_BIN_SECONDS = 2.0
MAX_LENGTH_BINS = 40
INTERVALS_PER_BIN = 8  # average per bin, so that its mean is meaningful
MIN_FOR_BAND = 5
BAND = (0.1, 0.9)
# placeholders for the page's colour variables, since matplotlib needs colours
INK, GRID, CURVE, SHADE, ALERT = "#0000f1", "#0000f2", "#0000f3", "#0000f4", "#0000f5"
VARIABLES = {
    INK: "--muted",
    GRID: "--line",
    CURVE: "--accent",
    SHADE: "--band",
    ALERT: "--lost",
}
STYLE: dict[Any, Any] = {  # matplotlib's own type lists every setting
    "svg.fonttype": "none",  # keep text as text in the page's font
    "font.size": 11,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
}
NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}
WIDE, NARROW = (10.6, 2.7), (5.2, 2.7)  # inches: full width, half width
NUM_TICKS = 10
HEADROOM = 1.08
MAX_LOSSES = 300  # more ticks would merge into a wall


@dataclass(frozen=True)
class Throughput:
    """Tokens per second [num_bins] between `edges` [num_bins + 1]; recomputed tokens count."""

    edges: Column
    tokens_per_second: Column


@dataclass(frozen=True)
class ByLength:
    """A mean [num_bins] by length in tokens.

    `low` and `high` bound the middle 80 % of a bin's intervals; they are NaN if the bin has too few.
    """

    length: Column
    mean: Column
    low: Column
    high: Column


def throughput(found: Intervals, begin: float, end: float) -> Throughput:
    """Return the run's speed; the tokens of each interval are spread evenly over the interval."""
    num_bins = int(np.clip((end - begin) / MIN_BIN_SECONDS, 1, MAX_TIME_BINS))
    edges = np.linspace(begin, max(end, begin + 1e-3), num_bins + 1)
    seconds = np.maximum(found.end - found.start, 1e-9)
    rates = found.num_tokens / seconds
    starts = found.start - begin
    generated = _drawn_by(edges - begin, starts, rates) - _drawn_by(edges - begin, starts + seconds, rates)
    return Throughput(edges - begin, np.maximum(0.0, np.diff(generated)) / np.diff(edges))


def _drawn_by(moments: Column, starts: Column, rates: Column) -> Column:
    firsts = np.searchsorted(moments, starts)  # the first moment after each start
    rate, before = (
        np.bincount(firsts, weights, len(moments) + 1)[: len(moments)].cumsum() for weights in (rates, rates * starts)
    )
    return rate * moments - before  # type: ignore[no-any-return]


def acceptance_by_length(found: Intervals) -> ByLength | None:
    """Return the mean acceptance length, 1 + accepted / drafts, or None if there were no drafts."""
    drafted = found.num_drafts > 0
    return _by_length(found.length[drafted], found.num_accepted_tokens[drafted], found.num_drafts[drafted], 1.0)


def ms_per_token_by_length(found: Intervals) -> ByLength | None:
    """Return a job's milliseconds per token, waits included, or None if there are no tokens."""
    drawn = found.num_tokens > 0
    milliseconds = 1000 * (found.end - found.start)
    return _by_length(found.length[drawn], milliseconds[drawn], found.num_tokens[drawn], 0.0)


def _by_length(length: Column, amount: Column, weight: Column, offset: float) -> ByLength | None:
    """Return `offset` + amount / weight per bin."""
    if len(length) == 0:
        return None
    num_bins = int(np.clip(len(length) / INTERVALS_PER_BIN, 1, MAX_LENGTH_BINS))
    edges = np.linspace(length.min(), length.max() + 1, num_bins + 1)
    bins = np.clip(np.digitize(length, edges) - 1, 0, num_bins - 1)
    rows = []
    for number in np.unique(bins):
        inside = bins == number
        own = offset + amount[inside] / weight[inside]
        low, high = np.quantile(own, BAND) if len(own) >= MIN_FOR_BAND else (np.nan, np.nan)
        mean = offset + amount[inside].sum() / weight[inside].sum()
        rows.append((np.average(length[inside], weights=weight[inside]), mean, low, high))
    return ByLength(*np.array(rows).T)


def throughput_chart(curve: Throughput, losses: Sequence[float]) -> Markup:
    """Draw tokens per second; `losses` (seconds) get ticks at the top."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": "throughput"}):
        figure, axes = _axes(WIDE)
        axes.stairs(curve.tokens_per_second, curve.edges, fill=True, color=SHADE)
        axes.stairs(curve.tokens_per_second, curve.edges, baseline=None, color=CURVE, linewidth=1.6)
        end = float(curve.edges[-1])
        top = max(float(curve.tokens_per_second.max()), 1e-9) * HEADROOM
        axes.set_ylim(0, top)
        axes.set_xlim(0, end)
        axes.plot(losses[:MAX_LOSSES], [top] * len(losses[:MAX_LOSSES]), "v", color=ALERT, markersize=7, clip_on=False)
        moments = ticks(end, NUM_TICKS)
        axes.xaxis.set_major_locator(FixedLocator([moment for moment, _ in moments]))
        axes.set_xticklabels([label for _, label in moments])
        return _svg(figure, "Tokens per second over time")


def length_chart(curve: ByLength, title: str, from_zero: bool) -> Markup:
    """Draw a mean over the band of the middle 80 %."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": title}):
        figure, axes = _axes(NARROW)
        axes.fill_between(curve.length, curve.low, curve.high, where=~np.isnan(curve.low), color=SHADE, linewidth=0)
        axes.plot(curve.length, curve.mean, color=CURVE, linewidth=1.8, marker="o", markersize=3.5)
        axes.set_xlim(left=0)
        if from_zero:
            axes.set_ylim(0, max(float(np.nanmax([*curve.mean, *curve.high])), 1e-9) * HEADROOM)
        else:
            axes.set_ylim(bottom=1, top=max(1.5, axes.get_ylim()[1]))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        return _svg(figure, title)


def _axes(size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasSVG(figure)  # needs no display
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.grid(axis="y", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    return figure, axes


def _svg(figure: Figure, label: str) -> Markup:
    """Return the figure as an SVG element; `label` is for screen readers."""
    sink = io.StringIO()
    figure.savefig(sink, format="svg", metadata=NO_METADATA)
    text = sink.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' id="[^"]*_[0-9]+"', "", text)  # these ids repeat in each figure, but a page must not repeat ids
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)  # it would apply to the whole page
    text = re.sub(r"font: ([0-9.]+px)[^;\"]*", r"font-size: \1", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return Markup(text).replace("<svg ", Markup('<svg role="img" aria-label="{}" ').format(label), 1)


def _short(value: float, _position: int) -> str:
    return f"{value / 1000:g}K" if abs(value) >= 1000 else f"{value:g}"


# Jobs over workers as bars in lanes, placed in percent, so that HTML scales them without a script.


NUM_TONES = 6
MIN_PERCENT = 0.08  # percent of the width; shorter bars are invisible
TINY_PERCENT = 1.2  # percent; a shorter bar has no room for a sign
ENDS = {
    "finished": "finished",
    "released": "handed back with all its tokens",
    "lost": "lost, with what it had not written",
    "cancelled": "cancelled",
    "running": "still running",
}


@dataclass(frozen=True)
class Bar:
    """One attempt; `left` and `width` are percentages of the run's time, `wait` of the bar."""

    left: float
    width: float
    wait: float
    tone: int
    outcome: str
    is_resume: bool
    job_number: int
    label: str
    text: str

    @property
    def is_tiny(self) -> bool:
        return self.width < TINY_PERCENT


@dataclass(frozen=True)
class WorkerRow:
    """One worker of one driver, with one lane per simultaneous job."""

    name: str
    lanes: tuple[tuple[Bar, ...], ...]


@dataclass(frozen=True)
class Gantt:
    """All workers in order of arrival; `num_left_out` attempts are too short."""

    rows: tuple[WorkerRow, ...]
    num_left_out: int


def gantt(facts: RunFacts, begin: float, end: float) -> Gantt:
    """Return the longest attempts between two times."""
    longest = facts.tally.longest
    workers: dict[tuple[int, str], list[tuple[Attempt, Bar]]] = {}
    for entry in sorted(longest, key=lambda entry: (entry.attempt.start, entry.job_number)):
        attempt, bar = entry.attempt, _bar(entry, begin, end)
        workers.setdefault((attempt.driver, attempt.worker_id), []).append((attempt, bar))
    by_age = sorted(workers, key=lambda key: (key[0], len(key[1]), key[1]))  # w2 before w10
    rows = tuple(WorkerRow(_name(key, facts.num_drivers), _lanes(workers[key])) for key in by_age)
    return Gantt(rows, len(facts.tally.starts) - len(longest))


def attempt_line(attempt: Attempt, begin: float) -> str:
    """Describe an attempt in words; times since `begin`."""
    words = f"attempt {attempt.number} on {attempt.worker_id}, {clock(attempt.start - begin)} to "
    words += f"{clock(attempt.end - begin)}: "
    if attempt.resume is not None:
        words += f"resumed ({attempt.resume.kind}) in {attempt.resume.seconds:.1f} s with "
        words += f"{attempt.resume.num_recovered_tokens:,} tokens, {attempt.resume.num_recomputed_tokens:,} drawn "
        words += "again; "
    return words + ENDS[attempt.outcome]


def _bar(entry: LongAttempt, begin: float, end: float) -> Bar:
    attempt = entry.attempt
    span = max(end - begin, 1e-9)
    seconds = max(attempt.end - attempt.start, 1e-9)
    return Bar(
        left=round(100 * (attempt.start - begin) / span, 3),
        width=round(max(100 * seconds / span, MIN_PERCENT), 3),
        wait=round(100 * min(1.0, max(0.0, (attempt.first_token - attempt.start) / seconds)), 1),
        tone=entry.job_number % NUM_TONES,
        outcome=attempt.outcome,
        is_resume=attempt.resume is not None,
        job_number=entry.job_number,
        label=entry.job_name,
        text=f"{entry.job_name}: {attempt_line(attempt, begin)}",
    )


def _lanes(bars: list[tuple[Attempt, Bar]]) -> tuple[tuple[Bar, ...], ...]:
    """Put each bar, sorted by start, into the first free lane."""
    lanes: list[list[Bar]] = []
    ends: list[float] = []
    for attempt, bar in bars:
        lane = next((lane for lane, end in enumerate(ends) if end <= attempt.start), len(lanes))
        if lane == len(lanes):
            lanes.append([])
            ends.append(0.0)
        lanes[lane].append(bar)
        ends[lane] = attempt.end
    return tuple(tuple(lane) for lane in lanes)


def _name(key: tuple[int, str], num_drivers: int) -> str:
    driver, worker_id = key
    return worker_id if num_drivers < 2 else f"{worker_id} of driver {driver}"
