"""Measures the seconds of forwards by number of rows and length. Also has the clocks with which drafters measure."""

from __future__ import annotations

import bisect
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from swiftbatch.worker.forward.expert_counts import ExpertCounts, ExpertSpread
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import SequenceRows, known_rows, tree_rows
from swiftbatch.worker.kernels.cuda.cuda_graph import Work, capture
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, TILE_ROWS
from swiftbatch.worker.kv.full_cache import FullKVCache, new_cache_of
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES
from swiftbatch.worker.sampling.draft_tree import DraftTree


def seconds_now() -> float:
    """Return seconds of a clock. Only differences between two calls have a meaning."""
    return time.perf_counter()


class Clock:
    """Clock for calls that may only queue their work on a device.

    On a GPU, the time that the host takes to queue work counts only if the GPU waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_of_gpu = device.type == "cuda"

    def seconds(self, call: Callable[[], object]) -> float:
        """Time one call, from the end of all earlier work to the end of the call's own work. Waits for both."""
        if not self._is_of_gpu:
            started = seconds_now()
            call()
            return seconds_now() - started
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


def captured_seconds(work: Work, device: torch.device, num_rounds: int) -> float:
    """Return the median seconds of captured work, so that short kernels do not wait for their launches."""
    graph = capture(work, device)
    graph.replay()
    return statistics.median(Clock(device).seconds(graph.replay) for _ in range(num_rounds))


# Seconds of the target's forwards by number of rows and cache length. They tell the cost of drafts and replays.


ROW_COUNTS = (1, 2, 4, 8, 16, 32)
PROBE_LENGTHS = (BLOCK, 8192, 49_152)
PROBE_BYTES = 1 << 28  # most bytes of a probe's cache
PROBE_REPEATS = 3
PROBE_STRIDE = 7919  # between probe tokens; a prime, so that few vocabularies repeat one
ROW_PRICES = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)  # in units of the time that all rows of a forward share
FEWEST_REPEATS = 2  # a single measurement may include page faults, or another program's work
LEAST_SECONDS = 1e-9  # lower bound, because a coarse clock may return 0
ROUTED_EVERY = 8  # steps between two corrections by the number of experts that steps used
LONG_SECONDS = 0.3  # bound for all times of one forward; a slow forward is timed less often
MOST_SECONDS = 4.0  # behind these, lengths from the third on are left to the line through the first two


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a forward on a grid of cache lengths and row counts; linear between the points and beyond them.

    The shared part is paid once per `rows_per_forward` rows or a part of them. With `has_experts`, every row costs its
    own experts.
    """

    lengths: tuple[int, ...]
    seconds: np.ndarray  # [num_lengths, len(ROW_COUNTS)]
    rows_per_forward: int = 1
    has_experts: bool = False
    spread: ExpertSpread | None = None  # corrects seconds by the experts of real steps
    full_seconds: float | None = None  # seconds of a whole forward of `rows_per_forward` rows with experts of their own
    widths: tuple[tuple[int, float], ...] = ()  # rows and seconds of empty forwards, if there are several, ascending

    def as_routed(self) -> StepCosts:
        """Return costs corrected by the number of experts in real steps, updated every few steps."""
        return self if self.spread is None else self._routed.newest(self, self.spread)

    @functools.cached_property
    def _routed(self) -> _RoutedCosts:
        return _RoutedCosts()

    def at(self, num_rows: int, length: int) -> float:
        """Return the seconds of one forward over `num_rows` rows after `length` cached positions."""
        i = max(0, min(bisect.bisect_left(self.lengths, length), len(self.lengths) - 1) - 1)
        seconds, slope = self._lines[min(num_rows, ROW_COUNTS[-1])][i]
        return max(LEAST_SECONDS, seconds + slope * (length - self.lengths[i]))

    def forward_seconds(self, num_rows: int, length: int, num_sequences: int) -> float:
        """Return the seconds of a forward of `num_rows` rows for each of several sequences."""
        own = self.at(num_rows, length) - self.shared_seconds(min(num_rows, ROW_COUNTS[-1]))
        return self.shared_seconds(num_rows * num_sequences) + num_sequences * own

    def shared_seconds(self, num_rows: int) -> float:
        """Return the seconds that all rows of a forward share: its linear layers."""
        if self.rows_per_forward > 1:
            full, left = divmod(num_rows, self.rows_per_forward)
            return full * self._one_forward(self.rows_per_forward) + (self._one_forward(left) if left else 0.0)
        return self._one_forward(num_rows)

    def _one_forward(self, num_rows: int) -> float:
        beyond = max(0, num_rows - ROW_COUNTS[-1])
        wider = next((seconds - self.widths[0][1] for rows, seconds in self.widths if num_rows <= rows), 0.0)
        return self._empty[num_rows - beyond] + beyond * self._row_seconds(num_rows) + wider

    def row_prices(self, num_rows: int) -> tuple[float, ...]:
        """Return prices to try for one more row beside `num_rows`, in shared seconds.

        If rows cost nothing until the forward is full, one of these prices fills exactly this forward.
        """
        if self.rows_per_forward > 1:
            own = (self._row_seconds(num_rows),) if self.has_experts else ()
            counts = [rows for rows, _ in self.widths] or [self.rows_per_forward]
            return (*own, *(price * self._empty[0] / rows for rows in counts for price in ROW_PRICES))
        return (self._row_seconds(num_rows),)

    def _row_seconds(self, num_rows: int) -> float:
        most = ROW_COUNTS[-1]
        if self.full_seconds is not None and num_rows > most:
            return max(0.0, self.full_seconds - self._empty[most]) / (self.rows_per_forward - most)
        few = min(num_rows, most // 2)
        return (self._empty[most] - self._empty[few]) / (most - few)

    def own_seconds(self, num_rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return each sequence's seconds of attention to its own cache, `[num_sequences, num_choices]`.

        `num_rows [num_choices]`, at most the measured ones; `lengths [num_sequences]` cached positions.
        """
        points, rises = self._grid
        i = np.clip(np.searchsorted(self.lengths, lengths), 1, max(1, len(self.lengths) - 1)) - 1
        seconds = points[i] + rises[i] * (lengths - np.array(self.lengths)[i])[:, None]
        own: np.ndarray = (seconds - np.array(self._empty))[:, num_rows]
        return own

    @functools.cached_property
    def _grid(self) -> tuple[np.ndarray, np.ndarray]:
        """Return `_lines` as arrays `[num_lengths, ROW_COUNTS[-1] + 1]`: seconds and slopes."""
        grid = np.array(self._lines).transpose(2, 1, 0)
        return grid[0], grid[1]

    @functools.cached_property
    def _lines(self) -> list[list[tuple[float, float]]]:
        """Return seconds and slope at each measured length, for every number of rows, as plain numbers for speed."""
        lines = []
        for number in range(ROW_COUNTS[-1] + 1):
            points = [float(np.interp(number, ROW_COUNTS, row)) for row in self.seconds]
            rises = np.diff(points) / np.diff(self.lengths)
            lines.append([(point, max(0.0, float(rise))) for point, rise in zip(points, [*rises, 0.0], strict=True)])
        return lines

    @functools.cached_property
    def _empty(self) -> list[float]:
        shares_all = self.rows_per_forward > 1 and not self.has_experts
        return [self.at(1 if shares_all else number, 0) for number in range(ROW_COUNTS[-1] + 1)]

    def replay_seconds(self, start: int, end: int) -> float:
        """Return the seconds to run known tokens at positions `[start, end)`, in full tiles."""
        num_parts = max(1, self.rows_per_forward // TILE_ROWS)  # tiles per forward
        num_forwards = max(0, end - start) / (num_parts * TILE_ROWS)
        return num_forwards * sum(self.forward_seconds(TILE_ROWS, length, num_parts) for length in (start, end)) / 2


class _RoutedCosts:
    def __init__(self) -> None:
        self._costs: StepCosts | None = None
        self._num_steps = 0

    def newest(self, probed: StepCosts, spread: ExpertSpread) -> StepCosts:
        """Return probed costs, corrected again if enough steps have passed."""
        num_steps = spread.counts.num_steps
        is_known = abs(num_steps - self._num_steps) < min(ROUTED_EVERY, max(1, self._num_steps))
        if self._costs is None or not is_known:
            seconds = np.maximum(LEAST_SECONDS, probed.seconds - spread.saved_seconds())
            self._costs = replace(probed, seconds=np.maximum.accumulate(seconds, axis=1), spread=None)
            self._num_steps = num_steps
        return self._costs


Costs = Callable[[], StepCosts]
"""A target's step costs, measured when somebody first asks for them, or before."""


def step_costs_of(target: TargetModel) -> Costs:
    """Return a function that returns a target's costs.

    They are measured now if caches are in slots, otherwise at the first call.
    """
    costs = functools.cache(functools.partial(measure_step_costs, target))
    if target.forwards.arena:
        costs()
    return costs


def measure_step_costs(target: TargetModel) -> StepCosts:
    """Time forwards over an empty cache of several lengths. Takes a second with the embedded model."""
    cache, lengths = _probe_cache(target)
    seconds: list[list[float]] = []
    started = seconds_now()
    for length in lengths:
        if len(seconds) >= 2 and seconds_now() - started > MOST_SECONDS:
            break
        cache.roll_back(0)
        cache.advance(length)
        rows = [_probe_rows(cache, number, target.vocab_size) for number in ROW_COUNTS]
        forwards = [functools.partial(target.verify, [each]) for each in rows]
        seconds.append(_least_seconds(target, forwards))
    # disturbances only add time, so fewer rows never take more than the best time of more rows
    rising = np.minimum.accumulate(np.array(seconds)[:, ::-1], axis=1)[:, ::-1]
    counts = target.forwards.expert_counts
    spread = None if counts is None else _measure_spread(target, cache, counts)
    known = (target.forwards.rows_per_forward, target.forwards.has_experts, spread, _full_seconds(target, cache))
    return StepCosts(lengths[: len(seconds)], rising, *known, _widths(target, cache))


def _full_seconds(target: TargetModel, cache: FullKVCache) -> float | None:
    """Time a whole forward over an empty cache; or return None if it costs no more than the shared part."""
    num_rows, arena = target.forwards.rows_per_forward, target.forwards.arena
    if not target.forwards.has_experts or arena is None or arena.longest_job < num_rows:
        return None
    [seconds] = _whole_seconds(target, cache, [num_rows])
    return seconds


def _widths(target: TargetModel, cache: FullKVCache) -> tuple[tuple[int, float], ...]:
    """Time a whole empty forward of each number of rows, as far as the cache has room."""
    counts, arena = (*target.forwards.narrow_rows, target.forwards.rows_per_forward), target.forwards.arena
    if len(counts) == 1 or arena is None or arena.longest_job < counts[-1]:
        return ()
    return tuple(zip(counts, np.maximum.accumulate(_whole_seconds(target, cache, counts)).tolist(), strict=True))


def _whole_seconds(target: TargetModel, cache: FullKVCache, counts: Sequence[int]) -> list[float]:
    cache.roll_back(0)
    rows = [known_rows(cache, _probe_tokens(number, target.vocab_size)) for number in counts]
    return _least_seconds(target, [functools.partial(target.verify, each) for each in rows])


def _measure_spread(target: TargetModel, cache: FullKVCache, counts: ExpertCounts) -> ExpertSpread:
    """Measure time and number of experts for rows with equal experts, and for rows with different ones."""
    cache.roll_back(0)
    cache.advance(BLOCK)
    counts.forget()
    seconds, met = np.zeros((2, len(ROW_COUNTS))), np.zeros((2, len(ROW_COUNTS)))
    for which, stride in enumerate((0, PROBE_STRIDE)):
        rows = [_probe_rows(cache, number, target.vocab_size, stride) for number in ROW_COUNTS]
        seconds[which] = _least_seconds(target, [functools.partial(target.verify, [each]) for each in rows])
        for column, each in enumerate(rows):
            target.verify([each])
            met[which, column] = counts.newest()
    counts.forget()
    alike, apart = np.maximum.accumulate(seconds, axis=1)
    return ExpertSpread(ROW_COUNTS, np.maximum(0, apart - alike), met[0], met[1], counts)


def _least_seconds(target: TargetModel, forwards: Sequence[Callable[[], object]]) -> list[float]:
    """Return the shortest time of each forward.

    Forwards take turns, so that a busy moment affects all of them alike.
    """
    times: list[list[float]] = [[] for _ in forwards]
    for repeat in range(PROBE_REPEATS):
        for forward, taken in zip(forwards, times, strict=True):
            if repeat < FEWEST_REPEATS or sum(taken) <= LONG_SECONDS:
                taken.append(seconds_of(target, forward))
    return [min(taken) for taken in times]


def _probe_rows(cache: FullKVCache, number: int, vocab_size: int, stride: int = PROBE_STRIDE) -> SequenceRows:
    """Return rows with distant tokens, which meet as many experts as possible."""
    token_ids = _probe_tokens(number, vocab_size, stride)
    return tree_rows(cache, token_ids[0], DraftTree.chain(token_ids[1:]))


def _probe_tokens(number: int, vocab_size: int, stride: int = PROBE_STRIDE) -> list[int]:
    return [stride * each % vocab_size for each in range(number)]


def seconds_of(target: TargetModel, forward: Callable[[], object]) -> float:
    return Clock(target.device).seconds(forward)


def _probe_cache(target: TargetModel) -> tuple[FullKVCache, tuple[int, ...]]:
    """Return a cache of zeros and the lengths to time in it; layers of a large cache share memory.

    On a GPU the cache is a whole slot.
    """
    if arena := target.forwards.arena:
        cache = target.new_cache(arena.longest_job)
        cache.clear()
        return cache, _probe_lengths(arena.longest_job - TILE_ROWS)
    shape, num_bytes = target.cache_shape, target.cache_shape.bytes_per_position()
    shares = not target.is_offloaded and not shape.stripes
    if shares:
        num_bytes //= shape.num_layers
    longest = min(PROBE_BYTES // num_bytes, target.files.max_positions - TILE_ROWS, PROBE_LENGTHS[-1])
    lengths = _probe_lengths(max(BLOCK, longest))
    capacity = max(lengths) + TILE_ROWS
    fits = capacity * shape.bytes_per_position() <= PROBE_BYTES and 2 * capacity <= target.num_free_positions()
    if not shares or fits:
        cache = target.new_cache(capacity)
        cache.clear()
        return cache, lengths
    size = (shape.num_parts, shape.num_kv_heads, capacity + MAX_TREE_NODES, shape.row_width)
    layer = torch.zeros(size, dtype=shape.row_dtype, device=shape.device)
    return new_cache_of(shape, capacity, layer.expand(shape.num_layers, *size)), lengths


def _probe_lengths(longest: int) -> tuple[int, ...]:
    """Return the lengths to time, in whole blocks.

    The longest is among them, otherwise costs would not rise with the cache.
    """
    last = max(0, longest) // BLOCK * BLOCK
    return (*(length for length in PROBE_LENGTHS if length < last), last)
