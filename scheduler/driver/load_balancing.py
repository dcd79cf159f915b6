"""Spreads a run's work so that all workers finish at the same time."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from swiftbatch.scheduler.driver.job_queue import JobQueue
from swiftbatch.scheduler.driver.throughput import JOB_SHARE
from swiftbatch.scheduler.driver.worker_fleet import Fleet, Worker

END_SLACK = 1.1  # others move if the longest job ends this much later than it could
MIN_RELIEF_SECONDS = 2.0  # moving must save this much too: returning and resuming takes about as long
MAX_PLANNED = 10_000  # with more jobs, long ones rarely matter and a plan is slow
PLAN_SLACK = 1.05  # a plan is a lower bound, and some jobs are always in transit


@dataclass(frozen=True)
class EndPlan:
    """The shortest time in which all jobs can end, and the seconds per token with 1, 2, ... jobs on a worker."""

    seconds: float
    per_token: NDArray[np.float64]

    def most_jobs(self, num_left: int) -> int:
        """Return the most jobs that a worker can run if a job with `num_left` tokens left must end in time."""
        return max(1, int(np.searchsorted(self.per_token, PLAN_SLACK * self.seconds / max(1, num_left), "right")))


@dataclass(frozen=True)
class LastJobs:
    """The worker that will end last, and the speed of the others."""

    worker: Worker
    speed_of_others: float  # tokens per second


class LoadBalancer:
    """Decides which workers should take more waiting jobs."""

    def __init__(self, queue: JobQueue, fleet: Fleet, num_workers: int) -> None:
        self._queue, self._fleet, self._num_workers = queue, fleet, num_workers
        self._relieved: set[str] = set()  # jobs moved away from a longest one

    def has_share(self, num_held: int, num_left: int) -> bool:
        """Return whether a worker has its share of the jobs or of the tokens."""
        is_share_of_jobs = num_held >= math.ceil(self._queue.num_to_run / self._num_workers)
        return is_share_of_jobs or (num_held > 0 and num_left >= self._queue.num_tokens_left / self._num_workers)

    def plan(self, most_jobs: int) -> EndPlan | None:
        """Plan the remaining jobs so that all end as early as possible; a long job shares its worker with few others.

        Returns None if fewer than two workers are ready, if there are very many jobs, or if filling all workers would
        end about as early.
        """
        num_ready = sum(worker.state == "ready" for worker in self._fleet.workers)  # starting workers may never come
        if num_ready < 2 or self._queue.num_unfinished > MAX_PLANNED:
            return None
        lefts = np.maximum(1, self._queue.expected_lefts())
        per_token = self._seconds_per_token(most_jobs)
        low = float(lefts.max(initial=1) * per_token[0])
        high = max(low, float(lefts.sum() * per_token[0]))
        while high > 1.01 * low:
            middle = math.sqrt(low * high)
            if _worker_seconds(lefts, per_token, middle) <= num_ready * middle:
                high = middle
            else:
                low = middle
        unplanned = _seconds_of_first(np.sort(lefts)[::-1][::num_ready].tolist(), per_token)
        return EndPlan(high, per_token) if unplanned > PLAN_SLACK * high else None

    def _seconds_per_token(self, most_jobs: int) -> NDArray[np.float64]:
        """Return the seconds per token of a worker with 1, 2, ... jobs."""
        pace, numbers = self._fleet.pace, range(1, most_jobs + 1)
        if pace.seconds_per_token(1) > 0:
            return np.maximum.accumulate([pace.seconds_per_token(number) for number in numbers])
        return 1 - JOB_SHARE + JOB_SHARE * np.array(numbers) / most_jobs

    def of_last(self, now: float) -> LastJobs | None:
        """Return the worker whose longest job ends last, or None if the other workers' speeds are unknown."""
        ready = [worker for worker in self._fleet.workers if worker.state == "ready"]
        if len(ready) < 2 or self._is_far_from_end(ready, now):
            return None
        worker = max(ready, key=lambda worker: self._seconds_of(self._lefts(worker)))
        if not self._queue.of(worker.id).running:
            return None
        others = sum(other.speed.tokens_per_second(now) for other in ready if other is not worker)
        return LastJobs(worker, others) if others > 0 and self._fleet.pace.seconds_per_token(1) > 0 else None

    def _is_far_from_end(self, ready: list[Worker], now: float) -> bool:
        """Return whether the end is certainly far, which saves a slow look at each worker."""
        num_jobs = 1 + max(len(self._queue.of(worker.id).running) for worker in ready)
        longest = self._queue.most_tokens
        seconds = longest * self._fleet.pace.seconds_per_token(num_jobs)
        speed = sum(worker.speed.tokens_per_second(now) for worker in ready)
        return seconds > 0 and seconds * speed <= self._queue.num_expected_left - num_jobs * longest

    def may_have_more(self, last: LastJobs) -> bool:
        """Return whether the last-ending worker may get one more job and still end before the others."""
        lefts = self._lefts(last.worker)
        num_jobs = len(lefts) + 1
        seconds = lefts[-1] * self._fleet.pace.seconds_per_token(num_jobs)
        return seconds * last.speed_of_others <= self._queue.num_expected_left - num_jobs * lefts[-1]

    def too_many(self, last: LastJobs) -> list[str]:
        """Return the jobs to hand back so that this worker's longest job ends at the same time as all other jobs.

        Besides the longest job, the jobs with the fewest tokens left stay. No job is handed back twice.
        """
        forecast = self._queue.forecast()
        held = sorted(
            self._queue.of(last.worker.id).running.values(), key=lambda job: (job.num_expected(forecast), job.job_id)
        )
        lefts = [job.num_expected(forecast) for job in held]
        alone = lefts[-1] * self._fleet.pace.seconds_per_token(1)
        num_kept = len(held) - 1
        while num_kept and self._seconds_of([*lefts[:num_kept], lefts[-1]]) > END_SLACK * max(
            alone, (self._queue.num_expected_left - sum(lefts[:num_kept]) - lefts[-1]) / last.speed_of_others
        ):
            num_kept -= 1
        if self._seconds_of(lefts) - self._seconds_of([*lefts[:num_kept], lefts[-1]]) < MIN_RELIEF_SECONDS:
            return []
        surplus = [job.job_id for job in held[num_kept:-1] if job.job_id not in self._relieved]
        self._relieved.update(surplus)
        return surplus

    def _lefts(self, worker: Worker) -> list[int]:
        return [job.left for job in self._queue.growths(worker.id)]

    def _seconds_of(self, lefts: list[int]) -> float:
        """Return the seconds until jobs with `lefts` tokens (ascending) have ended, if no new job joins them."""
        pace, seconds, before = self._fleet.pace, 0.0, 0
        for num_ended, left in enumerate(lefts):
            seconds += (left - before) * pace.seconds_per_token(len(lefts) - num_ended)
            before = left
        return seconds


def _seconds_of_first(lefts: list[int], per_token: NDArray[np.float64]) -> float:
    """Return the seconds until all jobs end if the worker always runs as many jobs as it can."""
    running, waiting, seconds, drawn = lefts[: len(per_token)], deque(lefts[len(per_token) :]), 0.0, 0
    heapify(running)  # keys are the tokens drawn per job when they end
    while running:
        seconds += (running[0] - drawn) * float(per_token[len(running) - 1])
        drawn = heappop(running)
        if waiting:
            heappush(running, drawn + waiting.popleft())
    return seconds


def _worker_seconds(lefts: NDArray[np.int64], per_token: NDArray[np.float64], seconds: float) -> float:
    """Return the worker time of all jobs if each shares its worker with as many jobs as `seconds` allow."""
    num_jobs = np.clip(np.searchsorted(per_token, seconds / lefts, "right"), 1, len(per_token))
    return float((lefts * per_token[num_jobs - 1] / num_jobs).sum())
