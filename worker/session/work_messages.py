"""The work that the driver gives a worker, and the reports it gets back. No torch, so the driver needs none."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Self

from swiftbatch.jobs.job import JobRecord
from swiftbatch.metrics.counters import EngineCounters


@dataclass(frozen=True)
class Assignment:
    """One attempt at one job; the attempt's files carry its number, which no other attempt has."""

    job_id: str
    line_number: int
    num_prompt_tokens: int
    body: bytes  # the rest of its record, as `JobRecord.body`: the driver reads none of it
    attempt: int
    num_attempts: int = 1  # that the job has had with this one: people count so
    num_reported_tokens: int = 0  # what the last attempt had reported when it was lost
    num_shared_tokens: int = 0  # first ones of its prompt that other jobs have as well, so far as the driver can tell
    seniority: int = 0  # the lower one was given to a worker sooner, in its first attempt
    num_expected_tokens: int = 0  # that it may end with, so far as the driver can tell

    @classmethod
    def of(cls, record: JobRecord, attempt: int, num_attempts: int = 1) -> Self:
        return cls(record.job_id, record.line_number, record.num_prompt_tokens, record.body, attempt, num_attempts)

    @cached_property
    def record(self) -> JobRecord:
        """The whole of the job, which the worker reads."""
        return JobRecord.of_body(self.job_id, self.line_number, self.num_prompt_tokens, self.body)


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


OutcomeKind = Literal["running", "ended", "finished", "failed", "refused", "released", "evicted", "unbegun"]
"""What became of a job: only a `finished` one has its result in the store; one that has `ended` waits for that.

`failed` was this attempt, `refused` is each attempt. `released` and `evicted` jobs are handed back with a whole
checkpoint: as ordered or since the worker drains, or since the memory ran out. `unbegun` ones are of the reserve.
"""


@dataclass(frozen=True)
class JobOutcome:
    """What became of a job in a slice of work."""

    kind: OutcomeKind
    job_id: str
    num_generated_tokens: int = 0  # that it has, those that a resume recovered included
    reason: str = ""  # one line for the user: why it has failed or is refused
    error_code: str = ""  # of one that is refused


@dataclass
class WorkReport:
    """A worker's report of one slice of work, which it fills while it works.

    A job of the reserve of which it says anything but `unbegun` has begun.
    """

    outcomes: list[JobOutcome] = field(default_factory=list)  # as they came; a job that ends may finish in it, too
    num_generated_tokens: int = 0  # recovered tokens not counted
    is_draining: bool = False  # it had SIGTERM or was told to drain: it takes no more work
    counters: EngineCounters | None = None  # all that the worker has counted since it started; None now and then
    num_steps: int = 0
    num_job_steps: int = 0  # a step of five jobs counts five
    most_jobs: int = 0  # in a step

    @property
    def num_jobs(self) -> float:
        """The jobs that ran at a time, on average over the steps."""
        return self.num_job_steps / max(1, self.num_steps)

    def of(self, *kinds: OutcomeKind) -> list[JobOutcome]:
        """The outcomes of some kinds."""
        return [outcome for outcome in self.outcomes if outcome.kind in kinds]

    def count_steps(self, num_jobs: int, num_steps: int) -> None:
        """Count so many steps, taken at once, of so many jobs."""
        self.num_steps += num_steps
        self.num_job_steps += num_steps * num_jobs
        self.most_jobs = max(self.most_jobs, num_jobs)

    def has_many_empty(self, num_jobs: int) -> bool:
        """Tell whether so few jobs are left that the worker had better ask for others than go on with them."""
        return 2 * num_jobs <= self.most_jobs
