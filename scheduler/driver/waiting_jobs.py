"""Jobs that wait for a worker, in the order in which they are taken. Each call costs the logarithm of their number."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from jobs.job import JobRecord


@dataclass(eq=False)
class UnfinishedJob:
    record: JobRecord
    num_generated_tokens: int  # as last reported
    num_tokens_at_last_loss: int  # the most it ever had when an attempt was lost
    num_strikes: int = 0  # attempts lost in a row without progress
    runs_alone: bool = False
    not_before: float = 0.0
    worker_id: str = ""  # who has it, or had it last
    ticket: int | None = None  # its newest place among the waiting; None while it runs and when it has ended

    @property
    def num_left(self) -> int:
        return max(0, self.record.job.sampling.max_tokens - self.num_generated_tokens)


class WaitingJobs:
    """The longest job first, equals in file order, and none before its time.

    A place is given up by taking away the job's ticket: the entry in the heap is skipped when it comes up.
    """

    def __init__(self) -> None:
        self._tickets = count()
        self._delayed: list[tuple[float, int, UnfinishedJob]] = []
        self._sociable: list[tuple[int, int, int, UnfinishedJob]] = []
        self._loners: list[tuple[int, int, int, UnfinishedJob]] = []

    def put(self, job: UnfinishedJob) -> None:
        """Let a job wait, at least until its `not_before`; call it again when `runs_alone` has changed."""
        job.ticket = next(self._tickets)
        heappush(self._delayed, (job.not_before, job.ticket, job))

    def drop(self, job: UnfinishedJob) -> None:
        """Forget a job, waiting or not."""
        job.ticket = None

    def take(self, has_neighbours: bool, now: float) -> UnfinishedJob | None:
        """Take the longest job that may run now, or None; one that runs alone is passed over beside neighbours."""
        self._admit(now)
        heaps = [self._sociable] if has_neighbours else [self._sociable, self._loners]
        for heap in heaps:
            while heap and heap[0][2] != heap[0][3].ticket:
                heappop(heap)
        heaps = [heap for heap in heaps if heap]
        if not heaps:
            return None
        *_, job = heappop(min(heaps, key=lambda heap: heap[0]))
        job.ticket = None
        return job

    def _admit(self, now: float) -> None:
        """Let those whose time has come into the order by length."""
        while self._delayed and self._delayed[0][0] <= now:
            _, ticket, job = heappop(self._delayed)
            heap = self._loners if job.runs_alone else self._sociable
            heappush(heap, (-job.record.max_length, job.record.line_number, ticket, job))
