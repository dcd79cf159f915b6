"""Jobs that wait for a worker, in the order in which they are taken. Each call costs the logarithm of their number."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.shared_prompts import NOT_SHARED, SharedPrompt

CLASSES_PER_DOUBLING = 4  # of lengths: where the longest job has no room, the first of each shorter class is asked for
LEAST_LENGTH = 0.75  # of the longest job that may run: a shorter one never goes first for the sake of its prompt


@dataclass(eq=False)
class UnfinishedJob:
    record: JobRecord
    num_generated_tokens: int  # as last reported
    num_tokens_at_last_loss: int  # the most it ever had when an attempt was lost
    priority: int = 0  # the lower one comes first
    prompt: SharedPrompt = NOT_SHARED
    num_strikes: int = 0  # attempts lost in a row without progress
    runs_alone: bool = False
    not_before: float = 0.0
    seniority: int | None = None  # its number among all jobs that workers were given; None before its first attempt
    worker_id: str = ""  # the worker that has it, or had it last
    ticket: int | None = None  # its newest place among the waiting; None while it runs and when it has ended

    @property
    def num_left(self) -> int:
        return max(0, self.record.job.sampling.max_tokens - self.num_generated_tokens)

    @property
    def length_class(self) -> int:
        """A number for jobs of about this length."""
        return int(CLASSES_PER_DOUBLING * math.log2(self.record.max_length))

    def may_precede(self, first: UnfinishedJob) -> bool:
        """Return whether the job may go before `first`, which comes first, for the sake of its prompt."""
        is_as_long = self.record.max_length >= LEAST_LENGTH * first.record.max_length
        return is_as_long and self.priority == first.priority


class JobPlace(NamedTuple):
    """The place of a waiting job. Two places never compare by their jobs, since no two tickets are equal."""

    priority: int
    negative_length: int
    line_number: int
    ticket: int
    job: UnfinishedJob


Heap = list[JobPlace]
HasRoom = Callable[[UnfinishedJob], bool]


class WaitingJobs:
    """The lowest priority first, then the longest job, equals in file order, and none before its time.

    Among jobs of about the longest's length, a worker gets one whose prompt is like those it has had; else one whose
    prompt is like none that was begun, so that workers share no prompts while there are others. Where that one has no
    room, a shorter one of its priority may: it ends sooner, and the long one is asked for first again.
    A place is given up by taking away the job's ticket: the entry in a heap is skipped when it comes up.
    """

    def __init__(self) -> None:
        self._tickets = count()
        self._delayed: list[tuple[float, int, UnfinishedJob]] = []
        self._sociable: Heap = []
        self._loners: Heap = []
        self._groups: defaultdict[int, Heap] = defaultdict(list)  # those of `_sociable` by the group of their prompts
        self._by_length: defaultdict[int, Heap] = defaultdict(list)  # those of `_sociable` by their classes
        self._fresh: Heap = []  # those of no group, and of groups that were not begun
        self._begun: set[int] = set()

    def put(self, job: UnfinishedJob) -> None:
        """Let a job wait, at least until its `not_before`; call it again when `runs_alone` has changed."""
        job.ticket = next(self._tickets)
        heappush(self._delayed, (job.not_before, job.ticket, job))

    def drop(self, job: UnfinishedJob) -> None:
        """Forget a job, waiting or not."""
        job.ticket = None

    def take(self, has_neighbours: bool, now: float, groups: Iterable[int], has_room: HasRoom) -> UnfinishedJob | None:
        """The job that may run now, comes first and has room: it waits no longer. None if none.

        One that runs alone is passed over beside neighbours. `groups` are those of the worker's prompts.
        """
        self._admit(now)
        job = self._first_for(has_neighbours, groups)
        if job is not None and not has_room(job):
            job = next((other for other in self._shorter(job) if has_room(other)), None)
        if job is not None:
            self._take_away(job)
        return job

    def _first_for(self, has_neighbours: bool, groups: Iterable[int]) -> UnfinishedJob | None:
        """The job that comes first, or one of its priority, about as long, that suits a worker better."""
        first = _first([self._sociable] if has_neighbours else [self._sociable, self._loners])
        if first is None or first.runs_alone:
            return first
        while self._fresh and self._fresh[0].job.prompt.group in self._begun:
            heappop(self._fresh)
        own = [self._groups[group] for group in groups if group in self._groups]
        better = [job for job in (_first(own), _first([self._fresh])) if job and job.may_precede(first)]
        return better[0] if better else first

    def _shorter(self, job: UnfinishedJob) -> Iterator[UnfinishedJob]:
        """The first job of each class that is shorter than a job's, the longest class first."""
        for length_class in sorted(self._by_length, reverse=True):
            other = _first([self._by_length[length_class]])
            if length_class < job.length_class and other is not None and other.priority == job.priority:
                yield other

    def _take_away(self, job: UnfinishedJob) -> None:
        job.ticket = None
        if _first([self._by_length[job.length_class]]) is None:
            del self._by_length[job.length_class]
        if (group := job.prompt.group) is not None:
            self._begun.add(group)
            if _first([self._groups[group]]) is None:
                del self._groups[group]

    def _admit(self, now: float) -> None:
        """Let the jobs whose time has come into the order."""
        while self._delayed and self._delayed[0][0] <= now:
            _, ticket, job = heappop(self._delayed)
            place = JobPlace(job.priority, -job.record.max_length, job.record.line_number, ticket, job)
            heappush(self._loners if job.runs_alone else self._sociable, place)
            if job.runs_alone:
                continue
            heappush(self._by_length[job.length_class], place)
            if job.prompt.group is not None:
                heappush(self._groups[job.prompt.group], place)
            if job.prompt.group not in self._begun:
                heappush(self._fresh, place)


def _first(heaps: list[Heap]) -> UnfinishedJob | None:
    """The first job that still waits in some heaps, whose passed places are dropped."""
    for heap in heaps:
        while heap and heap[0].ticket != heap[0].job.ticket:
            heappop(heap)
    heads = [heap[0] for heap in heaps if heap]
    return min(heads).job if heads else None
