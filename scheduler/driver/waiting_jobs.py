"""Jobs that wait for a worker, in the order in which they are taken. Each call costs the logarithm of their number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import count

from swiftbatch.scheduler.driver.unfinished_job import JobPlace, UnfinishedJob
from swiftbatch.scheduler.driver.untouched_jobs import UntouchedJobs

Heap = list[JobPlace]
HasRoom = Callable[[UnfinishedJob], bool]


class WaitingJobs:
    """The lowest priority first, then the longest job, equals in file order, and none before its time.

    Among jobs of about the longest's length, a worker gets one whose prompt is like those it has had; else one whose
    prompt is like none that was begun, so that workers share no prompts while there are others. Where that one has no
    room, a shorter one of its priority may: it ends sooner, and the long one is asked for first again.
    A place is given up by taking away the job's ticket: the entry in a heap is skipped when it comes up. Jobs that no
    worker has had yet wait in arrays of their own.
    """

    def __init__(self, untouched: UntouchedJobs) -> None:
        self._untouched = untouched
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
        if job.ticket is not None and job.ticket < 0:
            self._untouched.take(job.ticket)
        job.ticket = None

    def first(self, has_neighbours: bool, now: float, groups: Iterable[int], has_room: HasRoom) -> UnfinishedJob | None:
        """The job that may run now, comes first and has room. None if none.

        One that runs alone is passed over beside neighbours. `groups` are those of the worker's prompts.
        """
        self._admit(now)
        job = self._first_for(has_neighbours, groups)
        if job is None or has_room(job):
            return job
        return next((other for other in self._shorter(job) if has_room(other)), None)

    def _first_for(self, has_neighbours: bool, groups: Iterable[int]) -> UnfinishedJob | None:
        """The job that comes first, or one of its priority, about as long, that suits a worker better."""
        waiting = [self._sociable] if has_neighbours else [self._sociable, self._loners]
        first = _first([*map(_head, waiting), self._untouched.first()])
        if first is None or first.runs_alone:
            return first
        while (fresh_head := _head(self._fresh)) is not None and fresh_head.job.prompt.group in self._begun:
            heappop(self._fresh)
        own = [self._untouched.first_of(group) for group in groups]
        own += [_head(self._groups[group]) for group in groups if group in self._groups]
        fresh = [fresh_head, self._untouched.first_fresh(self._begun)]
        better = [job for job in (_first(own), _first(fresh)) if job and job.may_precede(first)]
        return better[0] if better else first

    def take(self, job: UnfinishedJob) -> None:
        """Have the job that `first` returned wait no longer: a worker begins with it, and with its group."""
        self.drop(job)
        if _head(self._by_length[job.length_class]) is None:
            del self._by_length[job.length_class]
        if job.prompt.group is not None:
            self._begun.add(job.prompt.group)

    def _shorter(self, job: UnfinishedJob) -> Iterator[UnfinishedJob]:
        """The first job of each class that is shorter than a job's, of its priority, the longest class first."""
        for length_class in range(job.length_class - 1, -1, -1):
            touched = _head(self._by_length[length_class]) if length_class in self._by_length else None
            untouched = self._untouched.first_of_class(job.priority, length_class)
            other = _first([touched, untouched])
            if other is not None and other.priority == job.priority:
                yield other

    def _admit(self, now: float) -> None:
        """Let the jobs whose time has come into the order."""
        while self._delayed and self._delayed[0][0] <= now:
            _, ticket, job = heappop(self._delayed)
            place = JobPlace(job.priority, -job.length, job.entry.line_number, ticket, job)
            heappush(self._loners if job.runs_alone else self._sociable, place)
            if job.runs_alone:
                continue
            heappush(self._by_length[job.length_class], place)
            if job.prompt.group is not None:
                heappush(self._groups[job.prompt.group], place)
            if job.prompt.group not in self._begun:
                heappush(self._fresh, place)


def _head(heap: Heap) -> JobPlace | None:
    """The first place of a heap whose job still waits there; passed ones before it are dropped."""
    while heap and heap[0].ticket != heap[0].job.ticket:
        heappop(heap)
    return heap[0] if heap else None


def _first(places: Iterable[JobPlace | None]) -> UnfinishedJob | None:
    """The job of the first of some places."""
    heads = [place for place in places if place is not None]
    return min(heads).job if heads else None
