"""The order in which a run's waiting jobs are taken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.run.job_index import JobEntry, JobIndex
from swiftbatch.jobs.shared_prompts import SharedPrompt
from swiftbatch.scheduler.driver.expected_lengths import Forecast
from swiftbatch.scheduler.driver.queued_job import QueuedJob, Turn, length_class

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


class Wanted(NamedTuple):
    """The jobs that suit a worker's present jobs."""

    smallest_group: int  # a struck job needs at least this `max_group`; 0: no struck job
    has_others: bool  # whether jobs that are not struck suit, too

    @classmethod
    def beside(cls, running: Collection[QueuedJob], *, has_reserve: bool) -> Self:
        """Return the jobs for a worker with these jobs.

        Struck jobs run with struck jobs and with jobs that have progressed, but the last of a group alone: a loss then
        tells who is at fault.
        """
        groups = [job.max_group for job in running if job.max_group]
        size = max(len(groups) + 1, min(2, len(running) + 1))
        is_unfit = has_reserve or min(groups, default=size) < size
        is_unfit = is_unfit or not all(job.max_group or job.has_progressed for job in running)
        return cls(0 if is_unfit else size, not groups)


class WaitingJobs:
    """Waiting jobs by priority, then the longest first, equal ones in file order.

    Among jobs of similar length, a worker gets a prompt like its earlier prompts, else a prompt that no worker has. If
    a job has no room, a shorter job may go first. Heap entries with outdated turns are skipped.
    """

    def __init__(self, untouched: UntouchedJobs) -> None:
        self._untouched = untouched
        self._tickets = count()
        self._delayed: list[tuple[float, Turn, QueuedJob]] = []
        self._free: Heap = []  # jobs that are not struck
        self._struck: defaultdict[int, Heap] = defaultdict(list)  # by `max_group`
        self._groups: defaultdict[int, Heap] = defaultdict(list)  # `_free` by prompt group
        self._by_length: defaultdict[int, Heap] = defaultdict(list)  # `_free` by length class
        self._fresh: Heap = []  # jobs without a group or of new groups
        self._begun: set[int] = set()

    def put(self, job: QueuedJob) -> None:
        """Queue a job until its `not_before`; call again after `max_group` changed."""
        heappush(self._delayed, (job.not_before, job.wait(next(self._tickets)), job))

    def drop(self, job: QueuedJob) -> None:
        if job.turn is not None and job.turn[-1] < 0:
            self._untouched.take(job.turn[-1])
        job.turn = None

    def first(self, wanted: Wanted, now: float, groups: Iterable[int], has_room: HasRoom) -> QueuedJob | None:
        """Return the first wanted job that has room."""
        self._admit(now)
        job = self._first_for(wanted, groups)
        if job is None or has_room(job):
            return job
        shorter = self._shorter(job) if wanted.has_others else ()
        return next((other for other in shorter if has_room(other)), None)

    def _first_for(self, wanted: Wanted, groups: Iterable[int]) -> QueuedJob | None:
        """Return the first job, or a job of similar length whose prompt suits the worker better."""
        struck = [heap for size, heap in self._struck.items() if 0 < wanted.smallest_group <= size]
        others = [_head(self._free), self._untouched.first()] if wanted.has_others else []
        first = _first([*map(_head, struck), *others])
        if first is None or first.max_group:
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
        for shorter in range(job.length_class - 1, -1, -1):
            touched = _head(self._by_length[shorter]) if shorter in self._by_length else None
            untouched = self._untouched.first_of_class(job.priority, shorter)
            other = _first([touched, untouched])
            if other is not None and other.priority == job.priority:
                yield other

    def _admit(self, now: float) -> None:
        while self._delayed and self._delayed[0][0] <= now:
            _, turn, job = heappop(self._delayed)
            heappush(self._struck[job.max_group] if job.max_group else self._free, (turn, job))
            if job.max_group:
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
