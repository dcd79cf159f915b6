"""Orders from the driver to a worker, the jobs that wait there, and its reports, without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Self

from swiftbatch.jobs.job import JobRecord
from swiftbatch.metrics.counters import EngineCounters
from swiftbatch.worker.kv.kv_capacity import Growth


@dataclass(frozen=True)
class Assignment:
    """One attempt at one job; no other attempt at the job has the same number."""

    job_id: str
    line_number: int
    num_prompt_tokens: int
    body: bytes  # rest of the record, which the driver never reads
    attempt: int
    num_attempts: int = 1  # counts this attempt
    num_reported_tokens: int = 0  # reported by the last attempt
    num_shared_tokens: int = 0  # other jobs' prompts share these first tokens
    seniority: int = 0  # lower for a job whose first attempt started earlier
    num_expected_tokens: int = 0  # the driver's estimate

    @classmethod
    def of(cls, record: JobRecord, attempt: int, num_attempts: int = 1) -> Self:
        return cls(record.job_id, record.line_number, record.num_prompt_tokens, record.body, attempt, num_attempts)

    @cached_property
    def record(self) -> JobRecord:
        return JobRecord.of_body(self.job_id, self.line_number, self.num_prompt_tokens, self.body)

    def growth(self, num_prompt_tokens: int, num_tokens: int) -> Growth:
        """Return the job's positions after `num_tokens` generated ones, and those at its expected end."""
        end = num_prompt_tokens + max(num_tokens, self.num_expected_tokens)
        return Growth(num_prompt_tokens + num_tokens, end, self.num_shared_tokens)


@dataclass(frozen=True)
class Orders:
    """Orders for a slice of work, as job ids and assignments."""

    assignments: tuple[Assignment, ...] = ()
    reserve: tuple[Assignment, ...] = ()  # start in this order as places become free
    recalled: tuple[str, ...] = ()  # hand these back if they have not begun
    cancelled: tuple[str, ...] = ()
    released: tuple[str, ...] = ()  # checkpoint these, then hand them back
    seals: bool = True  # True: write all results when no job is left; False: more jobs come soon
    num_slots: int | None = None  # None: as many as memory allows
    num_pages: int | None = None  # None: no limit


class Backlog:
    """A worker's jobs that have not begun, in the driver's order."""

    def __init__(self) -> None:
        self._waiting: dict[str, Assignment] = {}
        self._num_slots: int | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def follow(self, orders: Orders) -> list[str]:
        """Add new jobs and drop cancelled ones; return the recalled jobs, which have not begun."""
        self._num_slots = orders.num_slots
        for job_id in orders.cancelled:
            self._waiting.pop(job_id, None)
        recalled = [job_id for job_id in orders.recalled if self._waiting.pop(job_id, None)]
        self._waiting |= {assignment.job_id: assignment for assignment in orders.reserve}
        return recalled

    def keep_to(self, num_jobs: int) -> None:
        """Limit the number of running jobs until the next orders."""
        self._num_slots = num_jobs

    def next(self, num_running: int, has_room: Callable[[Assignment], bool]) -> Assignment | None:
        """Take the first job that `has_room`; a shorter one may go before a long one."""
        if self._num_slots is not None and num_running >= max(1, self._num_slots):
            return None
        found = next(filter(has_room, self._waiting.values()), None)
        return self._waiting.pop(found.job_id) if found else None

    def give_up(self) -> list[str]:
        waiting, self._waiting = list(self._waiting), {}
        return waiting


OutcomeKind = Literal["running", "ended", "finished", "failed", "refused", "released", "evicted", "unbegun"]
"""State of a job; the result of an `ended` one is still to be stored, that of a `finished` one is.

`failed` is this attempt's, `refused` final. `released` (by an order or a drain) and `evicted` (memory ran out) jobs
were checkpointed.
"""


@dataclass(frozen=True)
class JobOutcome:
    """Outcome of a job in a slice of work."""

    kind: OutcomeKind
    job_id: str
    num_generated_tokens: int = 0  # counts recovered tokens
    reason: str = ""  # one line for the user, if it failed, is refused, or was evicted from a GPU's full memory
    error_code: str = ""  # set for a refused job


@dataclass
class WorkReport:
    """Worker's report of one slice of work; a reserve job has begun unless it is `unbegun`."""

    outcomes: list[JobOutcome] = field(default_factory=list)  # a job may end and finish in one report
    num_generated_tokens: int = 0  # without recovered tokens
    is_draining: bool = False  # the worker takes no more work
    counters: EngineCounters | None = None  # counted since the worker started; None between reports with counters
    num_steps: int = 0
    num_job_steps: int = 0  # a step of five jobs counts five
    most_jobs: int = 0

    @property
    def num_jobs(self) -> float:
        return self.num_job_steps / max(1, self.num_steps)

    def of(self, *kinds: OutcomeKind) -> list[JobOutcome]:
        return [outcome for outcome in self.outcomes if outcome.kind in kinds]

    def count_steps(self, num_jobs: int, num_steps: int) -> None:
        self.num_steps += num_steps
        self.num_job_steps += num_steps * num_jobs
        self.most_jobs = max(self.most_jobs, num_jobs)

    def has_many_empty(self, num_jobs: int) -> bool:
        """Return whether at least half of the places are free."""
        return 2 * num_jobs <= self.most_jobs
