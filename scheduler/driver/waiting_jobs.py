"""The order in which a run's waiting jobs are taken."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.run.job_index import JobEntry, JobIndex
from swiftbatch.jobs.shared_prompts import NOT_SHARED, SharedPrompt
from swiftbatch.scheduler.driver.expected_lengths import Forecast, LengthBucket
from swiftbatch.worker.kv.kv_capacity import Growth

CLASSES_PER_DOUBLING = 4  # length classes; if the longest job has no room, each shorter class is tried
PROGRESS_SHARE = 0.01  # share of max_tokens; an attempt that adds less made no progress
LEAST_LENGTH = 0.75  # share of the longest job's length; shorter ones never go first for their prompt


class Strikes(NamedTuple):
    """A job's number of losses without progress, and its number of tokens at the last loss."""

    num: int
    num_tokens: int


Turn = tuple[int, int, int, int]
"""The turn of a waiting job, the lowest first: its priority, its negative length, its line, and a ticket of its own."""


@dataclass(eq=False)
class QueuedJob:
    """An unfinished job, with or without a worker."""

    entry: JobEntry
    num_generated_tokens: int = 0  # last reported number
    num_tokens_at_last_loss: int = 0  # the most it had at any loss
    priority: int = 0  # lower comes first
    prompt: SharedPrompt = NOT_SHARED
    num_strikes: int = 0  # losses in a row without progress
    runs_alone: bool = False
    not_before: float = 0.0
    seniority: int | None = None  # order of first attempts over all jobs; None before
    worker_id: str = ""  # its present or last worker
    is_suspect: bool = False  # it may have killed a worker from the reserve, which no report would show
    has_ended: bool = False  # its worker has not written the result yet
    lives_at: LengthBucket | None = None  # its bucket among unfinished jobs of workers
    turn: Turn | None = None  # its turn while waiting, else None
    length: int = 0  # expected positions, by which it waits; 0: the most it may have

    def __post_init__(self) -> None:
        self.length = self.length or self.entry.max_length

    @property
    def job_id(self) -> str:
        return self.entry.job_id

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def strikes(self) -> Strikes:
        return Strikes(self.num_strikes, self.num_tokens_at_last_loss)

    @property
    def num_left(self) -> int:
        num_left = self.entry.max_tokens - self.num_generated_tokens
        return num_left if num_left > 0 and not self.has_ended else 0  # a driver asks about ten times per job

    @property
    def has_progressed(self) -> bool:
        """Return whether the job gained enough since its last loss."""
        needed = max(1, int(PROGRESS_SHARE * self.entry.max_tokens))
        return self.num_generated_tokens >= self.num_tokens_at_last_loss + needed

    def wait(self, ticket: int) -> Turn:
        self.turn = (self.priority, -self.length, self.entry.line_number, ticket)
        return self.turn

    def strike(self, num_strikes: int, max_attempts: int) -> None:
        """Set the job's strikes; a job with two strikes, or with one attempt left, runs alone."""
        self.num_strikes = num_strikes
        self.runs_alone = num_strikes >= max(1, min(2, max_attempts - 1))

    def num_final_tokens(self, forecast: Forecast) -> int:
        return forecast.final_tokens(self.entry.num_prompt_tokens, self.num_generated_tokens, self.entry.max_tokens)

    def num_expected(self, forecast: Forecast) -> int:
        return self.num_final_tokens(forecast) - self.num_generated_tokens

    def growth(self, forecast: Forecast) -> Growth:
        num_prompt_tokens = self.entry.num_prompt_tokens
        now, end = num_prompt_tokens + self.num_generated_tokens, num_prompt_tokens + self.num_final_tokens(forecast)
        return Growth(now, end, self.prompt.num_tokens)

    @property
    def length_class(self) -> int:
        return length_class(self.length)

    def may_precede(self, first: QueuedJob) -> bool:
        """Return whether this job may overtake `first` because of its prompt."""
        is_as_long = self.length >= LEAST_LENGTH * first.length
        return is_as_long and self.priority == first.priority


def length_class(length: int) -> int:
    return int(CLASSES_PER_DOUBLING * math.log2(length))


# Jobs that no worker had, in arrays; each call takes constant time.


NO_GROUP = -1
ROWS_AT_ONCE = 256
MAX_ENTRIES = 16 * ROWS_AT_ONCE


class UntouchedJobs:
    """Jobs that no worker had yet, by priority, then the longest first; their tickets are negative."""

    def __init__(
        self, index: JobIndex, priorities: NDArray[np.int64], groups: NDArray[np.int32], shared: NDArray[np.int32]
    ) -> None:
        """Take each job's priority, prompt group (or `NO_GROUP`) and shared tokens."""
        self._index = index
        self._priorities, self._groups, self._shared = priorities, groups, shared
        self._is_out = np.zeros(len(index), bool)
        self._entries: dict[int, JobEntry] = {}  # rows whose turn may come soon
        self.num_left = len(index)
        self.num_tokens_left = int(index.columns["max_tokens"].sum(dtype=np.int64))
        self.most_tokens = int(index.columns["max_tokens"].max(initial=0))
        self._put_in_order(index.columns["max_tokens"].astype(np.int64))

    @classmethod
    def none(cls) -> UntouchedJobs:
        none = np.zeros(0, np.int32)
        return cls(JobIndex.of([]), none.astype(np.int64), none, none)

    def expect(self, forecast: Forecast) -> None:
        columns = self._index.columns
        self._put_in_order(forecast.of_new(columns["num_prompt_tokens"], columns["max_tokens"]))

    def _put_in_order(self, num_tokens: NDArray[np.int64]) -> None:
        """Sort the jobs by priority and the given lengths."""
        rows, columns = np.flatnonzero(~self._is_out), self._index.columns
        self._lengths = columns["num_prompt_tokens"] + num_tokens
        order = np.lexsort((columns["line_number"][rows], -self._lengths[rows], self._priorities[rows]))
        self._order = rows[order].astype(np.int32)
        # indices into `_order`
        self._first_of_class = _starts(self._priorities[self._order], self._lengths[self._order])
        self._by_group = self._order[np.argsort(self._groups[self._order], kind="stable")]
        self._sorted_groups = self._groups[self._by_group]
        self._first = self._first_fresh = 0  # indices into `_order`
        self._first_of: dict[int, int] = {}  # indices into `_by_group`
        self._known: dict[int, QueuedJob] = {}  # rows already read and not taken
        self.num_expected_left = int(num_tokens[rows].sum())

    def first(self) -> QueuedJob | None:
        self._first = self._passed(self._order, self._first, lambda row: bool(self._is_out[row]))
        return self._job_at(self._order, self._first)

    def first_fresh(self, begun: Container[int]) -> QueuedJob | None:
        """Return the first job whose prompt group is not in `begun`."""

        def is_passed(row: int) -> bool:
            return bool(self._is_out[row]) or int(self._groups[row]) in begun

        self._first_fresh = self._passed(self._order, self._first_fresh, is_passed)
        return self._job_at(self._order, self._first_fresh)

    def first_of(self, group: int) -> QueuedJob | None:
        start = self._first_of.get(group)
        if start is None:
            start = int(self._sorted_groups.searchsorted(group))
        start = self._passed(self._by_group, start, lambda row: bool(self._is_out[row]) and self._groups[row] == group)
        self._first_of[group] = start
        is_there = start < len(self._by_group) and self._sorted_groups[start] == group
        return self._job_at(self._by_group, start) if is_there else None

    def first_of_class(self, priority: int, length_class: int) -> QueuedJob | None:
        """Return the first job of a priority and length class."""
        start = self._first_of_class.get((priority, length_class))
        if start is None:
            return None
        start = self._passed(self._order, start, lambda row: bool(self._is_out[row]))
        self._first_of_class[priority, length_class] = start
        job = self._job_at(self._order, start)
        is_there = job is not None and (job.priority, job.length_class) == (priority, length_class)
        return job if is_there else None

    def take(self, ticket: int) -> None:
        self._take(ticket + len(self._index))

    def _take(self, row: int) -> None:
        if not self._is_out[row]:
            self._is_out[row] = True
            self._known.pop(row, None)
            self.num_left -= 1
            self.num_tokens_left -= int(self._index.columns["max_tokens"][row])
            self.num_expected_left -= int(self._lengths[row]) - int(self._index.columns["num_prompt_tokens"][row])

    def take_all(self, job_ids: Iterable[str]) -> list[QueuedJob]:
        """Remove and return those of the jobs that are still untouched."""
        rows = [int(row) for row in self._index.rows_of("job_id", job_ids) if not self._is_out[row]]
        jobs = [self._job(row, self._index.entry(row)) for row in rows]
        for row in rows:
            self._take(row)
        return jobs

    def expected_lengths(self) -> NDArray[np.int64]:
        is_left = ~self._is_out
        lefts: NDArray[np.int64] = self._lengths[is_left] - self._index.columns["num_prompt_tokens"][is_left]
        return lefts

    def job_ids(self) -> Iterator[str]:
        return (job_id for row, job_id in enumerate(self._index.job_ids()) if not self._is_out[row])

    def places(self) -> NDArray[np.int64]:
        """Return the remaining rows in the run's tables."""
        return self._index.places[~self._is_out]

    def _passed(self, order: NDArray[np.int32], start: int, is_passed: Callable[[int], bool]) -> int:
        while start < len(order) and is_passed(int(order[start])):
            start += 1
        return start

    def _job_at(self, order: NDArray[np.int32], start: int) -> QueuedJob | None:
        if start >= len(order):
            return None
        row = int(order[start])
        if row not in self._known:
            if row not in self._entries and order is self._order:
                self._read_ahead(start)
            entry = self._entries.pop(row) if row in self._entries else self._index.entry(row)
            self._known[row] = self._job(row, entry)
        return self._known[row]

    def _read_ahead(self, start: int) -> None:
        """Read many jobs ahead, because that is faster."""
        rows = self._order[start : start + ROWS_AT_ONCE].astype(np.int64)
        rows = rows[~self._is_out[rows]]
        if len(self._entries) > MAX_ENTRIES:  # many were taken out of order
            self._entries.clear()
        self._entries.update(zip(rows.tolist(), self._index.some(rows).entries(), strict=True))

    def _job(self, row: int, entry: JobEntry) -> QueuedJob:
        group, num_tokens = int(self._groups[row]), int(self._shared[row])
        prompt = SharedPrompt(None if group == NO_GROUP else group, num_tokens)
        job = QueuedJob(entry, priority=int(self._priorities[row]), prompt=prompt, length=int(self._lengths[row]))
        job.wait(row - len(self._index))
        return job


def _starts(priorities: NDArray[np.int64], lengths: NDArray[np.int64]) -> dict[tuple[int, int], int]:
    """Return first indices by priority and class."""
    is_other = np.ones(len(lengths), bool)
    is_other[1:] = (priorities[1:] != priorities[:-1]) | (lengths[1:] != lengths[:-1])
    starts: dict[tuple[int, int], int] = {}
    for start in np.flatnonzero(is_other).tolist():
        starts.setdefault((int(priorities[start]), length_class(int(lengths[start]))), start)
    return starts


# The order of waiting jobs; calls take logarithmic time.


Heap = list[tuple[Turn, QueuedJob]]
HasRoom = Callable[[QueuedJob], bool]


class WaitingJobs:
    """Waiting jobs by priority, then the longest first, equal ones in file order.

    Among jobs of similar length, a worker gets a prompt like its earlier prompts, else a prompt that no worker has. If
    a job has no room, a shorter job may go first. Heap entries with outdated turns are skipped.
    """

    def __init__(self, untouched: UntouchedJobs) -> None:
        self._untouched = untouched
        self._tickets = count()
        self._delayed: list[tuple[float, Turn, QueuedJob]] = []
        self._sociable: Heap = []
        self._loners: Heap = []
        self._groups: defaultdict[int, Heap] = defaultdict(list)  # `_sociable` by prompt group
        self._by_length: defaultdict[int, Heap] = defaultdict(list)  # `_sociable` by length class
        self._fresh: Heap = []  # jobs without a group or of new groups
        self._begun: set[int] = set()

    def put(self, job: QueuedJob) -> None:
        """Queue a job until its `not_before`; call again after `runs_alone` changed."""
        heappush(self._delayed, (job.not_before, job.wait(next(self._tickets)), job))

    def drop(self, job: QueuedJob) -> None:
        if job.turn is not None and job.turn[-1] < 0:
            self._untouched.take(job.turn[-1])
        job.turn = None

    def first(self, has_neighbours: bool, now: float, groups: Iterable[int], has_room: HasRoom) -> QueuedJob | None:
        """Return the first job that may run and has room.

        With neighbours, jobs that run alone are skipped.
        """
        self._admit(now)
        job = self._first_for(has_neighbours, groups)
        if job is None or has_room(job):
            return job
        return next((other for other in self._shorter(job) if has_room(other)), None)

    def _first_for(self, has_neighbours: bool, groups: Iterable[int]) -> QueuedJob | None:
        """Return the first job, or a job of similar length whose prompt suits the worker better."""
        waiting = [self._sociable] if has_neighbours else [self._sociable, self._loners]
        first = _first([*map(_head, waiting), self._untouched.first()])
        if first is None or first.runs_alone:
            return first
        while (fresh_head := _head(self._fresh)) is not None and fresh_head.prompt.group in self._begun:
            heappop(self._fresh)
        own = [self._untouched.first_of(group) for group in groups]
        own += [_head(self._groups[group]) for group in groups if group in self._groups]
        fresh = [fresh_head, self._untouched.first_fresh(self._begun)]
        better = [job for job in (_first(own), _first(fresh)) if job and job.may_precede(first)]
        return better[0] if better else first

    def take(self, job: QueuedJob) -> None:
        """Take the job that `first` returned."""
        self.drop(job)
        if _head(self._by_length[job.length_class]) is None:
            del self._by_length[job.length_class]
        if job.prompt.group is not None:
            self._begun.add(job.prompt.group)

    def _shorter(self, job: QueuedJob) -> Iterator[QueuedJob]:
        """Yield the first job of each shorter class of the same priority."""
        for length_class in range(job.length_class - 1, -1, -1):
            touched = _head(self._by_length[length_class]) if length_class in self._by_length else None
            untouched = self._untouched.first_of_class(job.priority, length_class)
            other = _first([touched, untouched])
            if other is not None and other.priority == job.priority:
                yield other

    def _admit(self, now: float) -> None:
        while self._delayed and self._delayed[0][0] <= now:
            _, turn, job = heappop(self._delayed)
            heappush(self._loners if job.runs_alone else self._sociable, (turn, job))
            if job.runs_alone:
                continue
            heappush(self._by_length[job.length_class], (turn, job))
            if job.prompt.group is not None:
                heappush(self._groups[job.prompt.group], (turn, job))
            if job.prompt.group not in self._begun:
                heappush(self._fresh, (turn, job))


def _head(heap: Heap) -> QueuedJob | None:
    """Return the first valid entry of a heap, dropping outdated entries before it."""
    while heap and heap[0][0] is not heap[0][1].turn:
        heappop(heap)
    return heap[0][1] if heap else None


def _first(jobs: Iterable[QueuedJob | None]) -> QueuedJob | None:
    waiting = [(job.turn, job) for job in jobs if job is not None and job.turn is not None]
    return min(waiting)[1] if waiting else None
