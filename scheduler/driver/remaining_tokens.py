"""Estimates how many tokens remain, for the whole run and for each worker's jobs."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection
from typing import NamedTuple

from swiftbatch.scheduler.driver.expected_lengths import Forecast, LengthStatistics, RunningLengths, length_bucket_of
from swiftbatch.scheduler.driver.waiting_jobs import QueuedJob, UntouchedJobs
from swiftbatch.worker.kv.kv_capacity import Growth

FIRST_ORDER = 16  # ended jobs needed before others are sorted by expected length
NUM_ORDERS = 16  # the waiting jobs are sorted again after each of so many parts


class WorkerOutlook(NamedTuple):
    """The expected growth of a worker's running jobs, fewest tokens left first."""

    growths: list[Growth]
    mean_length: float  # tokens at the end

    def beside(self, growth: Growth, num_prompt_tokens: int) -> WorkerOutlook:
        growths, num_jobs = [*self.growths], len(self.growths)
        insort(growths, growth, key=_left)
        return WorkerOutlook(growths, (num_jobs * self.mean_length + growth.end - num_prompt_tokens) / (num_jobs + 1))


class RemainingTokens:
    """Expected job lengths, updated job by job."""

    def __init__(self, lengths: LengthStatistics, running: Collection[str]) -> None:
        """`running` is a live view of the running jobs' ids."""
        self._lengths, self._running = lengths, running
        self._living = RunningLengths()  # jobs of workers, also reserved ones, that have not ended
        self._known: Forecast | None = None
        self._num_moves = 0  # jobs that moved since `_known`
        self._outlooks: dict[str, WorkerOutlook] = {}  # by worker; dropped on any change
        self._next_order = FIRST_ORDER  # ended jobs until the next sort

    def forecast(self) -> Forecast:
        """Return a recent forecast, which stays nearly right as long as few jobs start or end."""
        if self._known is None or self._num_moves >= max(1, len(self._running)):
            self._known = self._lengths.forecast(self._living)
            self._num_moves = 0
            self._outlooks.clear()
        return self._known

    def outlook(self, worker_id: str, jobs: Collection[QueuedJob]) -> WorkerOutlook:
        """Return the expected growth of a worker's running jobs."""
        forecast = self.forecast()
        if (found := self._outlooks.get(worker_id)) is None:
            growths = [job.growth(forecast) for job in jobs]
            num_tokens = sum(each.end for each in growths) - sum(job.entry.num_prompt_tokens for job in jobs)
            found = WorkerOutlook(sorted(growths, key=_left), num_tokens / max(1, len(jobs)))
            self._outlooks[worker_id] = found
        return found

    def num_unexpected(self) -> int:
        return self.forecast().num_unexpected(self._living)

    def order_anew(self, untouched: UntouchedJobs) -> None:
        """Sort the untouched jobs by expected length, once enough other jobs have ended."""
        num_ended = self._lengths.num_ended
        if num_ended >= self._next_order:
            self._next_order = max(int(1.5 * num_ended), num_ended + untouched.num_left // NUM_ORDERS)
            untouched.expect(self.forecast())

    def begun(self, job: QueuedJob) -> None:
        if (outlook := self._outlooks.get(job.worker_id)) is not None and self._known is not None:
            self._outlooks[job.worker_id] = outlook.beside(job.growth(self._known), job.entry.num_prompt_tokens)

    def moved(self, job: QueuedJob) -> None:
        self._num_moves += 1
        if job.lives_at is not None:
            self.count(job, is_there=True)

    def ended(self, job: QueuedJob) -> None:
        self._lengths.note(job.entry.num_prompt_tokens, job.num_generated_tokens, job.entry.max_tokens)

    def changed(self, worker_id: str) -> None:
        self._outlooks.pop(worker_id, None)

    def count(self, job: QueuedJob, *, is_there: bool) -> None:
        """Add a worker's job to the counts at its present length, or remove it from them."""
        entry, place = job.entry, None
        if is_there:
            place = length_bucket_of(entry.num_prompt_tokens, job.num_generated_tokens, entry.max_tokens)
        if place == job.lives_at:
            return
        if job.lives_at is not None:
            self._living.take(job.lives_at, entry.max_tokens)
        if place is not None:
            self._living.add(place, entry.max_tokens)
        job.lives_at = place


def _left(job: Growth) -> int:
    return job.left
