"""Tracks a run's jobs: workers, remaining tokens, losses and failures. No Ray and no files.

A worker's reserve stays pending until it begins. `waiting_jobs.py` decides the order.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.jobs.shared_prompts import NOT_SHARED, SharedPrompt
from swiftbatch.jobs.storage.retries import Backoff
from swiftbatch.scheduler.driver.expected_lengths import Forecast, LengthStatistics, RunningLengths, length_bucket_of
from swiftbatch.scheduler.driver.queued_job import QueuedJob, Strikes
from swiftbatch.scheduler.driver.waiting_jobs import UntouchedJobs, WaitingJobs, Wanted
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


# The queue: who has which job.


MAX_ATTEMPTS = 5  # the default of --max-attempts
RETRY_BACKOFF = Backoff(first=0.5, longest=60.0)
NUM_GROUPS = 8  # prompt groups whose keys and values a worker may still have


def _always(_growth: Growth) -> bool:
    return True


@dataclass
class WorkerJobs:
    """A worker's jobs by id."""

    running: dict[str, QueuedJob] = field(default_factory=dict)  # in order of their start
    reserve: dict[str, QueuedJob] = field(default_factory=dict)  # the worker begins them by itself in this order
    unsealed: dict[str, QueuedJob] = field(default_factory=dict)  # ended jobs whose results are not written yet
    groups: deque[int] = field(default_factory=lambda: deque(maxlen=NUM_GROUPS))  # prompt groups of its latest jobs
    num_left: int = 0  # tokens up to all `max_tokens`

    @property
    def num_to_run(self) -> int:
        return len(self.running) + len(self.reserve)


class JobQueue:
    """A run's unfinished jobs, and counts of the others.

    A job fails after `max_attempts` consecutive losses without progress; `QueuedJob.strike` says which count. Only
    `unfinished` and `stop_running` take time per job.
    """

    def __init__(
        self, max_attempts: int, untouched: UntouchedJobs | None = None, lengths: LengthStatistics | None = None
    ) -> None:
        """`untouched` has the jobs that no worker had yet, `lengths` the lengths of ended jobs."""
        self._max_attempts = max_attempts
        self._untouched = untouched or UntouchedJobs.none()
        self._num_ended = {"finished": 0, "failed": 0, "cancelled": 0}
        self.num_generated_tokens = 0  # finished jobs included
        self._num_unsealed = 0
        self._num_tokens_left = 0  # sum up to max_tokens over the jobs in `_touched`
        self.most_tokens = self._untouched.most_tokens  # the largest limit of any job
        self._touched: dict[str, QueuedJob] = {}  # unfinished jobs outside `_untouched`
        self._running: dict[str, QueuedJob] = {}
        self._reserved: dict[str, QueuedJob] = {}  # not begun, in a worker's reserve
        self._workers: defaultdict[str, WorkerJobs] = defaultdict(WorkerJobs)
        self._waiting = WaitingJobs(self._untouched)
        self._expected = RemainingTokens(lengths or LengthStatistics(), self._running)
        self._seniorities = count()

    def add(
        self,
        entry: JobEntry,
        num_generated_tokens: int = 0,
        priority: int = 0,
        prompt: SharedPrompt = NOT_SHARED,
        strikes: Strikes | None = None,
    ) -> None:
        """Add an unfinished job; `num_generated_tokens` is the largest count of any attempt."""
        self.num_generated_tokens += num_generated_tokens
        job = QueuedJob(entry, num_generated_tokens, num_generated_tokens, priority, prompt)
        if strikes is not None:
            job.num_strikes, job.num_tokens_at_last_loss, job.max_group = strikes
            if job.has_progressed:
                job.clear_strikes()
            job.num_tokens_at_last_loss = max(strikes.num_tokens, num_generated_tokens)
        self._touch(job)

    def add_ended(self, state: str, num_generated_tokens: int, num_jobs: int = 1) -> None:
        self._num_ended[state] += num_jobs
        self.num_generated_tokens += num_generated_tokens

    def take(self, worker_id: str, now: float, has_room: Callable[[Growth], bool] = _always) -> QueuedJob | None:
        """Give a worker the first job that fits and may run together with the worker's other jobs.

        Among jobs of similar length, a prompt like those of the worker's jobs comes first.
        """
        forecast = self._expected.forecast()
        job = self._first(worker_id, now, lambda job: has_room(job.growth(forecast)))
        if job is None:
            return None
        self._hand_to(worker_id, job)
        self._run(job)
        return job

    def reserve(self, worker_id: str, now: float, has_room: Callable[[Growth], bool] = _always) -> QueuedJob | None:
        """Reserve the next job of `take`, unless it has strikes or may end the worker."""
        forecast = self._expected.forecast()
        job = self._first(worker_id, now, lambda job: not job.is_suspect and has_room(job.growth(forecast)))
        if job is None or job.max_group:
            return None
        self._hand_to(worker_id, job)
        self._reserved[job.job_id] = job
        self._workers[worker_id].reserve[job.job_id] = job
        return job

    def begin(self, job_id: str) -> QueuedJob | None:
        """Record that a reserved job began; return the job, or None if it is no longer reserved."""
        if (job := self._reserved.pop(job_id, None)) is None:
            return None
        del self._workers[job.worker_id].reserve[job_id]
        self._run(job)
        return job

    def of(self, worker_id: str) -> WorkerJobs:
        """Return a worker's jobs, read-only."""
        return self._workers[worker_id]

    def growths(self, worker_id: str) -> list[Growth]:
        """Return the growth of a worker's jobs, in the order of their expected ends."""
        return self._expected.outlook(worker_id, self._workers[worker_id].running.values()).growths

    def mean_length(self, worker_id: str) -> float:
        return self._expected.outlook(worker_id, self._workers[worker_id].running.values()).mean_length

    def forecast(self) -> Forecast:
        return self._expected.forecast()

    def progress(self, job_id: str, num_generated_tokens: int) -> None:
        """Record a job's tokens; enough progress clears its strikes."""
        if job := self.find(job_id):
            self._set_tokens(job, num_generated_tokens)
            if job.num_strikes and job.has_progressed:
                job.clear_strikes()
                if job.turn is not None:
                    self._waiting.put(job)

    def end(self, job_id: str, num_generated_tokens: int) -> None:
        """Record a running job's end, before its result is written."""
        if job := self._running.get(job_id):
            self._set_tokens(job, num_generated_tokens)
            self._expected.ended(job)
            self._leave(job)
            self._workers[job.worker_id].unsealed[job_id] = job
            self._set_ended(job, True)

    def finish(self, job_id: str, num_generated_tokens: int) -> None:
        if job := self.find(job_id):
            self._set_tokens(job, num_generated_tokens)
            if not job.has_ended:
                self._expected.ended(job)
            self.drop(job_id, "finished")

    def drop(self, job_id: str, state: str) -> None:
        """End an unfinished job as `finished`, `failed` or `cancelled`."""
        if job := self.find(job_id):
            del self._touched[job_id]
            self._take_back(job)
            self._waiting.drop(job)
            self._num_tokens_left -= job.num_left
            self._num_ended[state] += 1

    def lose(self, job_id: str, now: float, num_lost: int = 1) -> bool:
        """Requeue a job that was lost, as one of `num_lost` without progress; return False if no attempt is left."""
        job = self.find(job_id)
        assert job is not None, f"job {job_id} has ended"
        job.strike(self._max_attempts, num_lost)
        self._put_back(job, now + RETRY_BACKOFF.seconds(job.num_strikes))
        return job.num_strikes < self._max_attempts

    def release(self, job_id: str) -> None:
        """Requeue a released or reserved job without a strike."""
        if job := self._running.get(job_id) or self._reserved.get(job_id):
            self._put_back(job, 0.0)

    def stop_running(self) -> None:
        """Requeue all jobs of workers without strikes."""
        for job_id in [*self._running, *self._reserved]:
            self.release(job_id)

    def find(self, job_id: str) -> QueuedJob | None:
        if (job := self._touched.get(job_id)) is None:
            self.jobs([job_id])
            job = self._touched.get(job_id)
        return job

    def jobs(self, job_ids: Iterable[str]) -> list[QueuedJob]:
        wanted = set(job_ids)
        for job in self._untouched.take_all(wanted.difference(self._touched)):
            self._touch(job)
        return [self._touched[job_id] for job_id in sorted(wanted.intersection(self._touched))]

    def unfinished(self) -> list[str]:
        return [*self._touched, *self._untouched.job_ids()]

    def places(self) -> NDArray[np.int64]:
        touched = [job.entry.place for job in self._touched.values()]
        return np.sort(np.concatenate([np.array(touched, np.int64), self._untouched.places()]))

    def running(self) -> list[QueuedJob]:
        return list(self._running.values())

    def handed_out(self) -> set[str]:
        return {*self._running, *self._reserved}

    @property
    def num_unfinished(self) -> int:
        return len(self._touched) + self._untouched.num_left

    @property
    def num_to_run(self) -> int:
        return self.num_unfinished - self._num_unsealed

    @property
    def num_waiting(self) -> int:
        return self.num_unfinished - len(self._running) - len(self._reserved)

    @property
    def num_in_backlog(self) -> int:
        return len(self._reserved)

    @property
    def num_tokens_left(self) -> int:
        """Return the largest number of tokens that may still be drawn."""
        return self._num_tokens_left + self._untouched.num_tokens_left

    @property
    def num_expected_left(self) -> int:
        return max(0, self._num_tokens_left - self._expected.num_unexpected()) + self._untouched.num_expected_left

    def expected_lefts(self) -> NDArray[np.int64]:
        forecast = self._expected.forecast()
        touched = [job.num_expected(forecast) for job in self._touched.values() if not job.has_ended]
        return np.concatenate([np.array(touched, np.int64), self._untouched.expected_lengths()])

    def counts(self) -> dict[str, int]:
        num_running = len(self._running)
        return {"pending": self.num_unfinished - num_running, "running": num_running, **self._num_ended}

    def _first(self, worker_id: str, now: float, has_room: Callable[[QueuedJob], bool]) -> QueuedJob | None:
        """Return the first job that may run beside the worker's jobs and has room."""
        own = self._workers[worker_id]
        wanted = Wanted.beside(own.running.values(), has_reserve=bool(own.reserve))
        self._expected.order_anew(self._untouched)
        return self._waiting.first(wanted, now, own.groups, has_room)

    def _hand_to(self, worker_id: str, job: QueuedJob) -> None:
        self._waiting.take(job)
        own = self._workers[worker_id]
        if job.prompt.group is not None and job.prompt.group not in own.groups:
            own.groups.append(job.prompt.group)
        if job.seniority is None:
            job.seniority = next(self._seniorities)
        job.worker_id = worker_id
        if job.job_id not in self._touched:
            self._touched[job.job_id] = job
            self._num_tokens_left += job.num_left
        own.num_left += job.num_left
        self._expected.count(job, is_there=True)

    def _run(self, job: QueuedJob) -> None:
        self._workers[job.worker_id].running[job.job_id] = job
        self._running[job.job_id] = job
        self._expected.begun(job)

    def _touch(self, job: QueuedJob) -> None:
        self._touched[job.job_id] = job
        self._num_tokens_left += job.num_left
        self.most_tokens = max(self.most_tokens, job.entry.max_tokens)
        self._waiting.put(job)

    def _leave(self, job: QueuedJob) -> None:
        self._workers[job.worker_id].running.pop(job.job_id, None)
        self._expected.changed(job.worker_id)

    def _set_tokens(self, job: QueuedJob, num_generated_tokens: int) -> None:
        if num_generated_tokens == job.num_generated_tokens:
            return
        num_left = job.num_left
        self.num_generated_tokens += num_generated_tokens - job.num_generated_tokens
        job.num_generated_tokens = num_generated_tokens
        self._note_left(job, num_left)
        self._expected.moved(job)

    def _set_ended(self, job: QueuedJob, has_ended: bool) -> None:
        num_left = job.num_left
        job.has_ended = has_ended
        self._note_left(job, num_left)
        self._num_unsealed += 1 if has_ended else -1
        self._expected.count(job, is_there=False)

    def _note_left(self, job: QueuedJob, num_left: int) -> None:
        change = job.num_left - num_left
        self._num_tokens_left += change
        if job.turn is None and change:
            self._workers[job.worker_id].num_left += change
            self._expected.changed(job.worker_id)

    def _put_back(self, job: QueuedJob, not_before: float) -> None:
        self._take_back(job)
        job.not_before = not_before
        self._waiting.put(job)

    def _take_back(self, job: QueuedJob) -> None:
        job_id, own = job.job_id, self._workers[job.worker_id]
        if self._running.pop(job_id, None):
            self._leave(job)
        elif self._reserved.pop(job_id, None):
            del own.reserve[job_id]
        else:
            return
        if job.has_ended:
            del own.unsealed[job_id]
            self._set_ended(job, False)
        own.num_left -= job.num_left
        self._expected.count(job, is_there=False)
