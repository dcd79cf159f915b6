"""The work that the driver gives a worker, and the reports it gets back. No torch, so the driver needs none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from swiftbatch.jobs.job import JobRecord, SentJob
from swiftbatch.metrics.counters import EngineCounters


@dataclass(frozen=True)
class Assignment:
    """One attempt at one job; the attempt's files carry its number, which no other attempt has."""

    sent: SentJob
    attempt: int
    num_attempts: int = 1  # that the job has had with this one: people count so
    num_reported_tokens: int = 0  # what the last attempt had reported when it was lost
    num_shared_tokens: int = 0  # first ones of its prompt that other jobs have as well, so far as the driver can tell
    seniority: int = 0  # the lower one was given to a worker sooner, in its first attempt
    num_expected_tokens: int = 0  # that it may end with, so far as the driver can tell

    @property
    def job_id(self) -> str:
        return self.sent.job_id

    @cached_property
    def record(self) -> JobRecord:
        """The whole of the job, which the worker reads."""
        return self.sent.read()


@dataclass(frozen=True)
class Orders:
    """Orders to a worker for the start of a slice: take jobs in, drop some, hand some back. Ids are job ids."""

    assignments: tuple[Assignment, ...] = ()
    reserve: tuple[Assignment, ...] = ()  # to begin, in this order, when others have left
    recalled: tuple[str, ...] = ()  # hand these back if they have not begun
    cancelled: tuple[str, ...] = ()
    released: tuple[str, ...] = ()  # write a whole checkpoint of these, then hand them back
    seals: bool = True  # all results when no job runs any more; False where more jobs are about to come
    num_slots: int | None = None  # jobs that may run at a time; None for as many as there is memory for
    num_pages: int | None = None  # that caches of all jobs may take; None where that is no question


@dataclass(frozen=True)
class JobProgress:
    """The number of tokens that a job has, those that a resume recovered included."""

    job_id: str
    num_generated_tokens: int


@dataclass(frozen=True)
class WorkReport:
    """A worker's report of one slice of work."""

    progress: tuple[JobProgress, ...] = ()  # running jobs
    finished: tuple[JobProgress, ...] = ()  # their results are in the store
    failed: tuple[tuple[str, str], ...] = ()  # (job_id, reason): this attempt failed
    num_generated_tokens: int = 0  # in this slice, recovered tokens not counted
    released: tuple[JobProgress, ...] = ()  # handed back with a whole checkpoint, as ordered or because it drains
    is_draining: bool = False  # it had SIGTERM or was told to drain: it takes no more work
    counters: EngineCounters | None = None  # all that the worker has counted since it started; None now and then
    refused: tuple[tuple[str, str, str], ...] = ()  # (job_id, error code, message): every attempt would end so
    evicted: tuple[JobProgress, ...] = ()  # handed back with a whole checkpoint, since the memory ran out
    ended: tuple[JobProgress, ...] = ()  # in this slice; they take no room, and finish once their results are there
    begun: tuple[str, ...] = ()  # job ids of the reserve; what became of them stands in the other fields, too
    unbegun: tuple[str, ...] = ()  # job ids handed back from the reserve, as ordered or because the worker drains
    num_jobs: float = 0.0  # that ran at a time, on average over the slice's steps


@dataclass
class WorkSlice:
    """Collects what a report tells beside the jobs that run on; fields as in `WorkReport`."""

    failed: list[tuple[str, str]] = field(default_factory=list)
    refused: list[tuple[str, str, str]] = field(default_factory=list)
    released: list[JobProgress] = field(default_factory=list)
    evicted: list[JobProgress] = field(default_factory=list)
    ended: list[JobProgress] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    unbegun: list[str] = field(default_factory=list)
    num_steps: int = 0
    num_job_steps: int = 0  # a step of five jobs counts five
    most_jobs: int = 0  # in a step

    def count_steps(self, num_jobs: int, num_steps: int) -> None:
        """Count so many steps, taken at once, of so many jobs."""
        self.num_steps += num_steps
        self.num_job_steps += num_steps * num_jobs
        self.most_jobs = max(self.most_jobs, num_jobs)

    def has_many_empty(self, num_jobs: int) -> bool:
        """Tell whether so few jobs are left that the worker had better ask for others than go on with them."""
        return 2 * num_jobs <= self.most_jobs

    def report(
        self,
        progress: Iterable[JobProgress],
        finished: Iterable[JobProgress],
        num_generated_tokens: int,
        *,
        is_draining: bool,
        counters: EngineCounters | None,
    ) -> WorkReport:
        """The report of the slice, once it is over."""
        return WorkReport(
            progress=tuple(progress),
            finished=tuple(finished),
            failed=tuple(self.failed),
            num_generated_tokens=num_generated_tokens,
            released=tuple(self.released),
            is_draining=is_draining,
            counters=counters,
            refused=tuple(self.refused),
            evicted=tuple(self.evicted),
            ended=tuple(self.ended),
            begun=tuple(self.begun),
            unbegun=tuple(self.unbegun),
            num_jobs=self.num_job_steps / max(1, self.num_steps),
        )
