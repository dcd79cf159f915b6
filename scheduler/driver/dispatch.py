"""Gives jobs to workers: as many as fit the memory of each, and spread so that all end at the same time."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from swiftbatch.scheduler.display.events import JobStarted
from swiftbatch.scheduler.driver.job_queue import JobQueue
from swiftbatch.scheduler.driver.queued_job import QueuedJob
from swiftbatch.scheduler.driver.run_progress import DriverContext
from swiftbatch.scheduler.driver.worker_fleet import JOB_SHARE, Fleet, Worker, slice_seconds
from swiftbatch.worker.kernels.kernel_sizes import MOST_SLOTS
from swiftbatch.worker.kv.kv_capacity import PAGE, Growth, PoolSize, fit
from swiftbatch.worker.session.work_messages import Assignment

if TYPE_CHECKING:
    from swiftbatch.scheduler.driver.worker_fleet import Fleet

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


# The number of jobs that fit a worker.


MAX_BACKLOG = 1000  # more jobs would take a second to assign and make orders large
MEMORY_SHARE = 0.8  # share of free memory for caches; drafts and pending checkpoints need some


class WorkerCapacity:
    """Decides whether a worker takes another job.

    The decision may be wrong: a worker that runs out of memory returns its youngest jobs, and gets no new ones until
    one of its other jobs leaves.
    """

    def __init__(self, num_slots: int | None, fleet: Fleet, most_positions: int | None = None) -> None:
        """Use these limits; a limit of None is left to the worker."""
        self._num_slots, self._most_positions = num_slots, most_positions
        self._fleet = fleet

    def most_anywhere(self) -> int:
        """Return the largest number of jobs that any worker can run."""
        started = [self.most_jobs(worker) for worker in self._fleet.workers if worker.info]
        return max(1, max(started, default=self._num_slots or MOST_SLOTS))

    def is_full(self, worker: Worker, num_held: int) -> bool:
        return 0 < num_held >= self.most_jobs(worker)

    def most_jobs(self, worker: Worker) -> int:
        of_gpu = worker.info.num_slots if worker.info else None  # chosen at its start
        wanted = MOST_SLOTS if self._num_slots is None and of_gpu is None else self._num_slots
        return min(bound for bound in (wanted, of_gpu, worker.num_fitting) if bound is not None)

    def num_for_backlog(self, held: Sequence[Growth], mean_length: float, seconds: float) -> int:
        """Return how many jobs a worker will begin within `seconds`.

        Each new job is assumed to replace a job that ends, and to be `mean_length` long.
        """
        seconds_per_token = self._fleet.pace.seconds_per_token(len(held))
        if not held or seconds_per_token == 0.0:
            return 0
        num_tokens, mean_length = seconds / seconds_per_token, max(1.0, mean_length)
        lefts = [max(1, job.left) for job in held]
        ends = (num_tokens / left if left > num_tokens else 1 + (num_tokens - left) / mean_length for left in lefts)
        return min(MAX_BACKLOG, round(sum(ends)))

    def has_room(self, worker: Worker, held: list[Growth], job: Growth) -> bool:
        """Return whether a job fits together with the worker's jobs for a while."""
        num_pages = self.num_pages(worker)
        if not held or worker.info is None or num_pages is None:
            return not held or num_pages is None
        pool = worker.info.pool_size or PoolSize(num_pages, PAGE)
        return fit([*held, job], pool, worker.info.held_positions, worker.info.num_state_positions)

    def num_pages(self, worker: Worker) -> int | None:
        """Return the worker's share of its machine's memory in pages; starting workers get a share, too.

        Returns None if a GPU is divided into slots.
        """
        if worker.info is None:
            return 0
        if worker.info.pool_size is not None:
            return worker.info.pool_size.num_pages
        if worker.info.num_slots is not None:
            return None
        num_sharing = self._fleet.num_sharing(worker.info.node_id)
        share = int(MEMORY_SHARE * worker.info.num_free_positions / num_sharing)
        return (share if self._most_positions is None else min(share, self._most_positions)) // PAGE


# Job assignment, and moves between workers at the end of a run.


BACKLOG_SLICES = 1.5  # slices that a reserve lasts; a worker begins no more before its next orders
MIN_MOVE_SECONDS = 10.0  # jobs that end sooner stay
MIN_SHARE_LEFT = 0.25  # share of a job's tokens that must remain to repay a load or replay


class Dispatcher:
    """Gives idle workers jobs, and drains workers that must end."""

    def __init__(self, context: DriverContext) -> None:
        self._context = context
        self._queue, self._fleet, self._attempts = context.queue, context.fleet, context.attempts
        self._slots = WorkerCapacity(context.num_slots, context.fleet, context.most_positions)
        self._balance = LoadBalancer(context.queue, context.fleet, context.num_workers)
        self._last: LastJobs | None = None  # from the last rebalance
        self._plan: EndPlan | None = None  # from the last rebalance
        self._spread = -math.inf
        self._bodies = context.run.job_bodies(self._queue.places())

    def hand_out(self, now: float) -> None:
        """Start a call on every idle worker with work."""
        idle = list(self._fleet.idle)
        staying = [worker for worker in idle if worker.state != "draining"]
        for worker in idle:
            if worker.state == "draining":
                self._end(worker)
        dealt = self._deal(staying, now)
        for worker in staying:
            self._begin_slice(worker, dealt.get(worker.id, ()), now)

    def spread(self, now: float) -> None:
        """Rebalance jobs between workers, once a slice."""
        if now - self._spread < slice_seconds(len(self._fleet.workers)):
            return
        self._spread, self._last = now, self._balance.of_last(now)
        self._plan = self._balance.plan(self._slots.most_anywhere())
        if self._last is not None and not self._last.worker.orders.released:
            for job_id in self._balance.too_many(self._last):  # the run ends sooner without them
                self._last.worker.ask_back(job_id)
        if not self._queue.num_waiting and self._queue.counts()["running"]:
            self._order_move(now)

    def _order_move(self, now: float) -> None:
        """Let busy workers pass jobs to an empty one."""
        ready = [worker for worker in self._fleet.workers if worker.state == "ready"]
        num_held = [self._queue.of(worker.id).num_to_run for worker in ready]
        if all(num_held) or any(worker.orders.released or worker.orders.recalled for worker in ready):
            return  # no worker is empty, or a job is on its way
        if self._queue.num_in_backlog:
            for worker in ready:
                worker.recall(self._queue.of(worker.id).reserve)
            return
        job_speed = self._fleet.speed.tokens_per_second(now) / max(1, sum(num_held))
        movable = [
            (num_left, worker, job.job_id)
            for worker, num_jobs in zip(ready, num_held, strict=True)
            if num_jobs > 1
            for _, job in sorted(self._queue.of(worker.id).running.items())
            if (num_left := _num_left_to_move(job)) > job_speed * MIN_MOVE_SECONDS > 0
        ]
        if movable:
            _, worker, job_id = max(movable, key=lambda each: each[0])
            worker.ask_back(job_id)

    def _end(self, worker: Worker) -> None:
        jobs = self._queue.of(worker.id)
        if jobs.num_to_run or jobs.unsealed:
            self._fleet.drain(worker)
        else:
            self._fleet.retire(worker)

    def _deal(self, workers: Sequence[Worker], now: float) -> dict[str, list[QueuedJob]]:
        """Assign jobs to the worker with the least work left.

        The worker that will end last gets a job only if its own longest job still ends in time.
        """
        takers = [(self._turn_of(worker), number) for number, worker in enumerate(workers)]
        heapify(takers)
        dealt: defaultdict[str, list[QueuedJob]] = defaultdict(list)  # by worker
        while takers:
            _, number = takers[0]
            worker = workers[number]
            job = None if self._is_spared(worker) else self._next_for(worker, now)
            if job is None:
                heappop(takers)
                continue
            dealt[worker.id].append(job)
            heapreplace(takers, (self._turn_of(worker), number))
        return dealt

    def _turn_of(self, worker: Worker) -> int:
        """Return the worker's load, or 0 if there is a plan, so that workers are filled one after the other."""
        return self._queue.of(worker.id).num_left if self._plan is None else 0

    def _is_spared(self, worker: Worker) -> bool:
        """Return whether this is the worker that will end last and it should get no more jobs."""
        last = self._last
        if last is None or last.worker is not worker or not self._queue.num_waiting:
            return False
        return bool(self._queue.of(worker.id).running) and not self._balance.may_have_more(last)

    def _next_for(self, worker: Worker, now: float) -> QueuedJob | None:
        """Take a job if the worker should have one more."""
        own = self._queue.of(worker.id)
        num_held = len(own.running)
        if self._slots.is_full(worker, num_held) or self._balance.has_share(own.num_to_run, own.num_left):
            return None
        held = self._queue.growths(worker.id)
        if self._plan is not None and held and num_held >= self._plan.most_jobs(held[-1].left):
            return None
        has_room = partial(self._slots.has_room, worker, held)
        return self._queue.take(worker.id, now, has_room)

    def _refill(self, worker: Worker, now: float) -> list[QueuedJob]:
        """Take jobs for a worker's reserve.

        The reserve may hold a job that fits only after earlier jobs end.
        """
        queue, jobs = self._queue, list[QueuedJob]()
        if not queue.num_waiting or self._is_spared(worker):
            return jobs
        held = queue.growths(worker.id)
        seconds = BACKLOG_SLICES * slice_seconds(len(self._fleet.workers))
        num_wanted = self._slots.num_for_backlog(held, queue.mean_length(worker.id), seconds)
        own = queue.of(worker.id)
        num_left = own.num_left
        while len(own.reserve) < num_wanted:
            has_room = partial(self._slots.has_room, worker, held[len(own.reserve) + 1 :])
            if self._balance.has_share(own.num_to_run, num_left):
                break
            if (job := queue.reserve(worker.id, now, has_room)) is None:
                break
            jobs.append(job)
            num_left += job.entry.max_tokens
        return jobs

    def _begin_slice(self, worker: Worker, dealt: Sequence[QueuedJob], now: float) -> None:
        """Let a worker continue its jobs and the `dealt` ones."""
        own, reserve = self._queue.of(worker.id), self._refill(worker, now)
        if own.num_to_run or own.unsealed or worker.orders.cancelled:
            orders = replace(
                worker.orders,
                assignments=tuple(self._assignment(job, worker) for job in dealt),
                reserve=tuple(self._reserved(job) for job in reserve),
                num_pages=self._slots.num_pages(worker),
                num_slots=self._slots.most_jobs(worker),
                seals=not self._queue.num_waiting or not own.num_to_run,
            )
            self._fleet.work(worker, orders, slice_seconds(len(self._fleet.workers)), has_backlog=bool(own.reserve))

    def _reserved(self, job: QueuedJob) -> Assignment:
        return self._numbered(job, *self._attempts.number(job.job_id))

    def _assignment(self, job: QueuedJob, worker: Worker) -> Assignment:
        number, num_attempts = self._attempts.begin(job.job_id)
        self._context.display.note(JobStarted(job.name, worker.id, num_attempts, job.num_generated_tokens))
        return self._numbered(job, number, num_attempts)

    def _numbered(self, job: QueuedJob, number: int, num_attempts: int) -> Assignment:
        """Return the assignment; its attempt number keeps earlier holders from its files."""
        entry = job.entry
        return Assignment(
            *(entry.job_id, entry.line_number, entry.num_prompt_tokens, self._bodies.at(entry.place)),
            *(number, num_attempts),
            num_reported_tokens=job.num_generated_tokens,
            num_shared_tokens=job.prompt.num_tokens,
            seniority=job.seniority or 0,
            num_expected_tokens=job.num_final_tokens(self._queue.forecast()),
        )


def _num_left_to_move(job: QueuedJob) -> int:
    """Return how many tokens the job has left, or 0 if moving it would cost more than it gains."""
    num_done = job.num_generated_tokens
    num_left = job.entry.max_tokens - num_done
    return num_left if num_left >= MIN_SHARE_LEFT * (job.entry.num_prompt_tokens + num_done) else 0
