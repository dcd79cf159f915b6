"""The figures of a long generation: plain decoding in windows, marks on the way, what they say between two of them.

Tables show them to people, and a plot: time against length as in the paper's figure 1, rates as in its figure 3.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from rich.console import Group
from rich.table import Table

from bench.tables import new_table, number
from swiftbatch.jobs.json_records import Frozen
from swiftbatch.worker.bench_texts import BenchEngine
from swiftbatch.worker.drafters.autoregressive import AutoregressiveDrafter
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.sequence import Sequence


class PlainWindow(Frozen):
    """Plain decoding behind `num_tokens` generated tokens. `same_tokens` is None until the generation got past it."""

    num_tokens: int
    num_plain_tokens: int
    ms_per_token: float  # median
    same_tokens: bool | None


@dataclass(frozen=True)
class _Measured:
    num_tokens: int
    ms_per_token: float
    token_ids: np.ndarray  # [num_plain_tokens]


class PlainWindows:
    """Takes a generation's place for `size` tokens now and then. Its cache and its sequence stay as they are."""

    def __init__(self, target: TargetModel, size: int) -> None:
        self._target = target
        self._size = size
        self._engine = BenchEngine(target, AutoregressiveDrafter())
        self._measured: list[_Measured] = []

    def measure(self, sequence: Sequence, cache: FullKVCache) -> None:
        """Decode plainly from where the sequence stands; nothing where it has ended or was measured already."""
        num_tokens = sequence.num_generated_tokens
        size = min(self._size, sequence.num_remaining_tokens)
        if size == 0 or (self._measured and self._measured[-1].num_tokens == num_tokens):
            return
        plain = sequence.with_output(sequence.output_ids.tolist())
        plain.max_length = len(plain) + size
        self._engine.start(plain, cache.prefix(cache.length))
        seconds = []
        while plain.finish_reason is None:
            started = time.perf_counter()
            [(_, step)] = self._engine.step()  # ends with the token on the host, so a clock is right on a GPU too
            seconds += [(time.perf_counter() - started) / step.num_steps] * step.num_steps
        self._engine.stop(plain)
        self._measured.append(_Measured(num_tokens, 1000 * statistics.median(seconds), plain.output_ids[num_tokens:]))

    def compared(self, output_ids: np.ndarray) -> list[PlainWindow]:
        """All windows, compared with the generation's tokens so far, `[num_generated]`."""
        windows = []
        for measured in self._measured:
            generated = output_ids[measured.num_tokens :][: len(measured.token_ids)]
            is_past = len(generated) == len(measured.token_ids)
            windows.append(
                PlainWindow(
                    num_tokens=measured.num_tokens,
                    num_plain_tokens=len(measured.token_ids),
                    ms_per_token=round(measured.ms_per_token, 3),
                    same_tokens=np.array_equal(generated, measured.token_ids) if is_past else None,
                )
            )
        return windows

    def seconds(self, first: int, last: int) -> float:
        """Return the seconds of plain decoding of generated tokens `[first, last)`: the windows' times, integrated."""
        positions = [measured.num_tokens for measured in self._measured]
        return integral(positions, [measured.ms_per_token for measured in self._measured], first, last) / 1000


def integral(positions: list[int], values: list[float], first: int, last: int) -> float:
    """Integrate the curve through points of ascending positions over `[first, last]`: lines, level at both ends."""
    grid = [first, *(position for position in positions if first < position < last), last]
    return float(np.trapezoid(np.interp(grid, positions, values), grid))


SECONDS_DIGITS = 4
RATE_DIGITS = 4
RATES = ("speed-up", "alpha", "beta", "tokens\nper step")


class Mark(Frozen):
    """Counts since the first token, taken at a pause. Times in seconds, pauses left out."""

    num_tokens: int
    seconds: float
    num_steps: int
    num_accepted_tokens: int
    num_draft_depth: int  # summed over the drafts: the most tokens that could have been accepted
    num_ngram_accepted_tokens: int | None  # None for a drafter without token reuse
    num_rounds: int  # forwards with a partial cache
    step_seconds: dict[str, float]  # propose, verify, commit
    draft_seconds: dict[str, float]  # what proposing is made of, where the drafter tells


class LongFigures(Frozen):
    """One stretch of the generation, `[first_token, last_token)` of the output.

    `alpha` is the paper's equation 4, accepted tokens over T x (gamma + 1), where gamma + 1 is the depth of the tree
    that was drafted at a step; `beta` the share of it that token reuse alone proposed. None where nothing was drafted.
    """

    first_token: int
    last_token: int
    seconds: float
    plain_seconds: float
    ms_per_token: float
    plain_ms_per_token: float
    speedup: float
    alpha: float | None
    beta: float | None
    tokens_per_step: float  # the bonus token and steps without a draft included
    mean_draft_depth: float  # per step
    rounds_per_step: float
    step_ms: dict[str, float]  # per step and phase
    draft_ms: dict[str, float]

    @classmethod
    def between(cls, first: Mark, last: Mark, plain: PlainWindows) -> LongFigures:
        """Compute the figures from one mark to a later one, and what plain decoding takes there."""
        num_tokens = last.num_tokens - first.num_tokens
        num_steps = last.num_steps - first.num_steps
        accepted = last.num_accepted_tokens - first.num_accepted_tokens
        depth = last.num_draft_depth - first.num_draft_depth
        ngrams = (last.num_ngram_accepted_tokens or 0) - (first.num_ngram_accepted_tokens or 0)
        has_beta = depth and last.num_ngram_accepted_tokens is not None
        seconds = last.seconds - first.seconds
        plain_seconds = plain.seconds(first.num_tokens, last.num_tokens)
        return cls(
            first_token=first.num_tokens,
            last_token=last.num_tokens,
            seconds=round(seconds, SECONDS_DIGITS),
            plain_seconds=round(plain_seconds, SECONDS_DIGITS),
            ms_per_token=round(1000 * seconds / num_tokens, SECONDS_DIGITS),
            plain_ms_per_token=round(1000 * plain_seconds / num_tokens, SECONDS_DIGITS),
            speedup=round(plain_seconds / seconds, RATE_DIGITS),
            alpha=round(accepted / depth, RATE_DIGITS) if depth else None,
            beta=round(ngrams / depth, RATE_DIGITS) if has_beta else None,
            tokens_per_step=round(num_tokens / num_steps, RATE_DIGITS),
            mean_draft_depth=round(depth / num_steps, RATE_DIGITS),
            rounds_per_step=round((last.num_rounds - first.num_rounds) / num_steps, RATE_DIGITS),
            step_ms=per_step(first.step_seconds, last.step_seconds, num_steps),
            draft_ms=per_step(first.draft_seconds, last.draft_seconds, num_steps),
        )


class LongRecord(Frozen):
    """Figures when so many tokens were there: of the window behind the record before, and of all since the start."""

    num_tokens: int
    window: LongFigures
    total: LongFigures
    distinct: dict[str, float]  # distinct_1 to distinct_4 of the output so far


class LongResult(Frozen):
    engine: str
    num_tokens: int
    prefill_seconds: float
    tokens_sha256: str  # over the generated ids as little-endian uint32
    records: list[LongRecord]
    plain_windows: list[PlainWindow]
    marks: list[Mark]
    plain_seconds: list[float]  # of plain decoding up to each mark

    @property
    def has_same_tokens(self) -> bool:
        """True if plain decoding said the same in every window that could be compared."""
        return all(window.same_tokens is not False for window in self.plain_windows)


def per_step(first: dict[str, float], last: dict[str, float], num_steps: int) -> dict[str, float]:
    """Milliseconds of each phase, between two counts of seconds."""
    return {name: round(1000 * (last[name] - first[name]) / num_steps, SECONDS_DIGITS) for name in last}


def render(result: LongResult) -> Group:
    """Render the figures since the start, in each window and per step, and a summary in words."""
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


def _line(axes: Axes, lengths: list[int], values: Items[float | None], style: str, colour: str, label: str) -> None:
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
