"""The queue of jobs: which runs next, who has it, when it is given up. Plain bookkeeping, no Ray and no files."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from itertools import count

from swiftbatch.jobs.backoff import Backoff
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.shared_prompts import NOT_SHARED, SharedPrompt
from swiftbatch.scheduler.driver.lengths import Forecast, Lengths
from swiftbatch.scheduler.driver.waiting_jobs import UnfinishedJob, WaitingJobs
from swiftbatch.worker.caches.memory.pages import Growth

RETRIES = Backoff(first=0.5, longest=60.0)
NUM_GROUPS = 8  # of prompts, those that a worker had last: it may still have keys and values of them
PROGRESS_SHARE = 0.01  # an attempt that adds less than this share of max_tokens has made no progress


def _always(growth: Growth) -> bool:
    return True


class JobQueue:
    """The jobs of a run that are still to do, by priority and then the longest first, and counts of the others.

    A job is given up after `max_attempts` attempts in a row that were lost without progress. A long job that is
    preempted often but moves on each time is never given up; one that kills its workers at the same token is.
    A job that was lost twice so runs alone from then on, so that it can't draw its neighbours into its end.
    All totals are kept up to date, so that no call but `unfinished` and `stop_running` gets dearer with more jobs.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._num_ended = {"finished": 0, "failed": 0, "cancelled": 0}
        self.num_generated_tokens = 0  # of all jobs so far, the finished ones included
        self.num_tokens_left = 0  # if every job runs to its max_tokens
        self._unfinished: dict[str, UnfinishedJob] = {}
        self._running: dict[str, UnfinishedJob] = {}
        self._held: dict[str, set[str]] = defaultdict(set)  # the same jobs by worker
        self._groups: dict[str, deque[int]] = defaultdict(lambda: deque(maxlen=NUM_GROUPS))  # of prompts, by worker
        self._waiting = WaitingJobs()
        self._lengths, self._seniorities = Lengths(), count()
        self._known_forecast: Forecast | None = None  # None once jobs have moved on

    def add(
        self, record: JobRecord, num_generated_tokens: int = 0, priority: int = 0, prompt: SharedPrompt = NOT_SHARED
    ) -> None:
        """Add a job to do; `num_generated_tokens` are the most that an earlier attempt is known to have had."""
        job = UnfinishedJob(record, num_generated_tokens, num_generated_tokens, priority, prompt)
        self._unfinished[record.job_id] = job
        self.num_generated_tokens += num_generated_tokens
        self.num_tokens_left += job.num_left
        self._waiting.put(job)

    def add_ended(self, state: str, num_generated_tokens: int, max_tokens: int | None = None) -> None:
        """Count a job that an earlier driver saw end; one with `max_tokens` tells how long others may become."""
        self._num_ended[state] += 1
        if max_tokens is not None:
            self._lengths.note(num_generated_tokens, max_tokens)
        self.num_generated_tokens += num_generated_tokens

    def take(self, worker_id: str, now: float, has_room: Callable[[Growth], bool] = _always) -> JobRecord | None:
        """Give a worker the first job that may run now beside those it has, or None.

        Of equal priority and about as long, one comes first whose prompt is like those that the worker has read.
        """
        if self._has_loner(worker_id):
            return None
        held, groups, forecast = self._held[worker_id], self._groups[worker_id], self._forecast()
        job = self._waiting.take(bool(held), now, groups, lambda job: has_room(_growth(job, forecast)))
        if job is None:
            return None
        if job.prompt.group is not None and job.prompt.group not in groups:
            groups.append(job.prompt.group)
        if job.seniority is None:
            job.seniority = next(self._seniorities)
        job.worker_id = worker_id
        held.add(job.record.job_id)
        self._running[job.record.job_id] = job
        return job.record

    def held_by(self, worker_id: str) -> list[JobRecord]:
        """The jobs that a worker has: taken for it, and since then not put back or ended."""
        return [self._running[job_id].record for job_id in sorted(self._held[worker_id])]

    def num_left(self, worker_id: str) -> int:
        """The tokens that a worker's jobs have left if all run to their `max_tokens`."""
        return sum(self._running[job_id].num_left for job_id in self._held[worker_id])

    def growths(self, worker_id: str) -> list[Growth]:
        """The positions of the jobs that a worker has: now, and as expected at their ends."""
        forecast = self._forecast()
        return [_growth(self._running[job_id], forecast) for job_id in self._held[worker_id]]

    def progress(self, job_id: str, num_generated_tokens: int) -> None:
        """Note how far a job is; enough progress clears its strikes."""
        if job := self._unfinished.get(job_id):
            self._set_tokens(job, num_generated_tokens)
            if job.num_strikes and self._has_progressed(job):
                job.num_strikes, job.runs_alone = 0, False
                if job.ticket is not None:
                    self._waiting.put(job)

    def finish(self, job_id: str, num_generated_tokens: int) -> None:
        """Note a result."""
        if job := self._unfinished.get(job_id):
            self._set_tokens(job, num_generated_tokens)
            self._lengths.note(num_generated_tokens, job.record.job.sampling.max_tokens)
            self.drop(job_id, "finished")

    def drop(self, job_id: str, state: str) -> None:
        """Have a job ended, if it had not already: `finished`, `failed` or `cancelled`."""
        if job := self._unfinished.pop(job_id, None):
            self._take_back(job)
            self._waiting.drop(job)
            self.num_tokens_left -= job.num_left
            self._num_ended[state] += 1

    def lose(self, job_id: str, now: float) -> bool:
        """Put a job back whose attempt was lost. Returns False if it has no attempt left: then it is to be dropped."""
        job = self._unfinished[job_id]
        job.num_strikes = 1 if self._has_progressed(job) else job.num_strikes + 1
        job.runs_alone = job.num_strikes >= max(1, min(2, self._max_attempts - 1))
        job.num_tokens_at_last_loss = max(job.num_tokens_at_last_loss, job.num_generated_tokens)
        self._put_back(job, now + RETRIES.seconds(job.num_strikes))
        return job.num_strikes < self._max_attempts

    def release(self, job_id: str) -> None:
        """Put a running job back whose worker gave it up on purpose: without blame, and at once."""
        if job := self._running.get(job_id):
            self._put_back(job, 0.0)

    def stop_running(self) -> None:
        """Put all running jobs back, without blame, since all workers are gone."""
        for job_id in list(self._running):
            self.release(job_id)

    def record(self, job_id: str) -> JobRecord | None:
        """The job, while it is still to do."""
        job = self._unfinished.get(job_id)
        return job.record if job else None

    def num_reported_tokens(self, job_id: str) -> int:
        """The tokens that a job had when it was last heard of."""
        return self._unfinished[job_id].num_generated_tokens

    def num_shared_tokens(self, job_id: str) -> int:
        """The number of first tokens of a job's prompt that other jobs have as well."""
        return self._unfinished[job_id].prompt.num_tokens

    def seniority(self, job_id: str) -> int:
        """The number that a job has kept since its first attempt, lower than those of jobs that began later."""
        return self._unfinished[job_id].seniority or 0

    def unfinished(self) -> list[str]:
        """Ids of all jobs still to do."""
        return list(self._unfinished)

    def running(self) -> list[tuple[JobRecord, int]]:
        """Running jobs with the tokens they have, in the order they were taken."""
        return [(job.record, job.num_generated_tokens) for job in self._running.values()]

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def counts(self) -> dict[str, int]:
        num_running = len(self._running)
        return {"pending": len(self._unfinished) - num_running, "running": num_running, **self._num_ended}

    def _forecast(self) -> Forecast:
        if self._known_forecast is None:
            jobs = self._running.values()
            running = ((job.num_generated_tokens, job.record.job.sampling.max_tokens) for job in jobs)
            self._known_forecast = self._lengths.forecast(running)
        return self._known_forecast

    def _has_loner(self, worker_id: str) -> bool:
        return any(self._running[job_id].runs_alone for job_id in self._held[worker_id])

    def _has_progressed(self, job: UnfinishedJob) -> bool:
        needed = max(1, int(PROGRESS_SHARE * job.record.job.sampling.max_tokens))
        return job.num_generated_tokens >= job.num_tokens_at_last_loss + needed

    def _set_tokens(self, job: UnfinishedJob, num_generated_tokens: int) -> None:
        self._known_forecast = None
        num_left = job.num_left
        self.num_generated_tokens += num_generated_tokens - job.num_generated_tokens
        job.num_generated_tokens = num_generated_tokens
        self.num_tokens_left += job.num_left - num_left

    def _put_back(self, job: UnfinishedJob, not_before: float) -> None:
        self._take_back(job)
        job.not_before = not_before
        self._waiting.put(job)

    def _take_back(self, job: UnfinishedJob) -> None:
        if self._running.pop(job.record.job_id, None):
            self._held[job.worker_id].remove(job.record.job_id)


def _growth(job: UnfinishedJob, forecast: Forecast) -> Growth:
    """The positions of a job: its prompt's, and those of the tokens that it has and is expected to have."""
    num_prompt_tokens, max_tokens = job.record.num_prompt_tokens, job.record.job.sampling.max_tokens
    num_final_tokens = forecast.final_tokens(job.num_generated_tokens, max_tokens)
    return Growth(num_prompt_tokens + job.num_generated_tokens, num_prompt_tokens + num_final_tokens)
