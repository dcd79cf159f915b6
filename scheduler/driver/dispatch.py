"""Gives each worker jobs that fit its memory, and moves jobs near the end."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING

from swiftbatch.scheduler.display.events import JobStarted
from swiftbatch.scheduler.driver.driver_state import DriverContext
from swiftbatch.scheduler.driver.load_balancing import EndPlan, LastJobs, LoadBalancer
from swiftbatch.scheduler.driver.waiting_jobs import QueuedJob
from swiftbatch.scheduler.driver.worker_fleet import Worker, slice_seconds
from swiftbatch.worker.kernels.kernel_sizes import MOST_SLOTS
from swiftbatch.worker.kv.kv_capacity import PAGE, Growth, PoolSize, fit
from swiftbatch.worker.session.work_messages import Assignment

if TYPE_CHECKING:
    from swiftbatch.scheduler.driver.worker_fleet import Fleet

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
        self._order_relief()
        if not self._queue.num_waiting and self._queue.counts()["running"]:
            self._order_move(now)

    def _order_relief(self) -> None:
        """Let the worker that will end last return jobs if the run then ends sooner."""
        if self._last is not None and not self._last.worker.orders.released:
            for job_id in self._balance.too_many(self._last):
                self._last.worker.ask_back(job_id)

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

        The worker that will end last gets only jobs beside which its longest job still ends in time.
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
