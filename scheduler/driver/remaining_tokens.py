"""The expectations of a run's jobs, by those that have ended: tokens yet to come, and how each worker's jobs grow."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection
from typing import NamedTuple

from swiftbatch.scheduler.driver.expected_lengths import Forecast, LengthStatistics, RunningLengths, length_bucket_of
from swiftbatch.scheduler.driver.waiting_jobs import QueuedJob, UntouchedJobs
from swiftbatch.worker.kv.kv_capacity import Growth

FIRST_ORDER = 16  # jobs that have ended before the order of others follows from their lengths
NUM_ORDERS = 16  # parts of the jobs that wait: one ends before the rest is put in order anew


class WorkerOutlook(NamedTuple):
    """The expected growth of the jobs that run on a worker: `growths` with the fewest tokens left first."""

    growths: list[Growth]
    mean_length: float  # tokens at their ends

    def beside(self, growth: Growth, num_prompt_tokens: int) -> WorkerOutlook:
        """The same with one more job."""
        growths, num_jobs = [*self.growths], len(self.growths)
        insort(growths, growth, key=_left)
        return WorkerOutlook(growths, (num_jobs * self.mean_length + growth.end - num_prompt_tokens) / (num_jobs + 1))


class RemainingTokens:
    """Lengths that jobs are expected to reach, by those that have ended. They are kept up to date job by job."""

    def __init__(self, lengths: LengthStatistics, running: Collection[str]) -> None:
        """`lengths` are of ended jobs, `running` the ids of jobs that run, as they come and go."""
        self._lengths, self._running = lengths, running
        self._living = RunningLengths()  # those that workers have, in reserve as well, and whose end no worker has seen
        self._known: Forecast | None = None
        self._num_moves = 0  # of jobs that have moved on since that forecast
        self._outlooks: dict[str, WorkerOutlook] = {}  # by worker; each is dropped with all that changes it
        self._next_order = FIRST_ORDER  # so many ended jobs

    def forecast(self) -> Forecast:
        """Return the forecast of now, or of a moment ago: most of what is known of many jobs is still true."""
        if self._known is None or self._num_moves >= max(1, len(self._running)):
            self._known = self._lengths.forecast(self._living)
            self._num_moves = 0
            self._outlooks.clear()
        return self._known

    def outlook(self, worker_id: str, jobs: Collection[QueuedJob]) -> WorkerOutlook:
        """The expected growth of the running jobs of a worker."""
        forecast = self.forecast()
        if (found := self._outlooks.get(worker_id)) is None:
            growths = [job.growth(forecast) for job in jobs]
            num_tokens = sum(each.end for each in growths) - sum(job.entry.num_prompt_tokens for job in jobs)
            found = WorkerOutlook(sorted(growths, key=_left), num_tokens / max(1, len(jobs)))
            self._outlooks[worker_id] = found
        return found

    def num_unexpected(self) -> int:
        """The tokens that the jobs of workers may draw yet and are not expected to."""
        return self.forecast().num_unexpected(self._living)

    def order_anew(self, untouched: UntouchedJobs) -> None:
        """Order the jobs that no worker has had by what is expected of them, once enough others have ended."""
        num_ended = self._lengths.num_ended
        if num_ended >= self._next_order:
            self._next_order = max(int(1.5 * num_ended), num_ended + untouched.num_left // NUM_ORDERS)
            untouched.expect(self.forecast())

    def begun(self, job: QueuedJob) -> None:
        """Note that a job runs."""
        if (outlook := self._outlooks.get(job.worker_id)) is not None and self._known is not None:
            self._outlooks[job.worker_id] = outlook.beside(job.growth(self._known), job.entry.num_prompt_tokens)

    def moved(self, job: QueuedJob) -> None:
        """Note that a job has other tokens than before."""
        self._num_moves += 1
        if job.lives_at is not None:
            self.count(job, is_there=True)

    def ended(self, job: QueuedJob) -> None:
        """Note the length that a job has come to."""
        self._lengths.note(job.entry.num_prompt_tokens, job.num_generated_tokens, job.entry.max_tokens)

    def changed(self, worker_id: str) -> None:
        """Note that a worker has other jobs than before, or tokens of them."""
        self._outlooks.pop(worker_id, None)

    def count(self, job: QueuedJob, *, is_there: bool) -> None:
        """Count a job of a worker where it is now, or no longer."""
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
