"""Gives workers jobs, as many as each has room for, and has one hand a job over to an idle one at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heapreplace

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.job import JobRecord
from swiftbatch.scheduler.display.job_events import JobStarted
from swiftbatch.scheduler.driver.balance import Balance
from swiftbatch.scheduler.driver.context import DriverContext
from swiftbatch.scheduler.driver.fleet import Worker
from swiftbatch.scheduler.driver.slots import Slots
from swiftbatch.worker.session.work import Assignment

SLICE_SECONDS = 0.5  # the work of a worker between two reports
MIN_MOVE_SECONDS = 10.0  # a job that ends sooner stays where it is
MIN_SHARE_LEFT = 0.25  # of the tokens so far: to load or replay them costs, and the rest has to make up for it


class Dispatcher:
    """Gives every idle worker its next slice, with new jobs where it has room; has those drain that are to end."""

    def __init__(self, context: DriverContext) -> None:
        self._context = context
        self._queue, self._fleet = context.queue, context.fleet
        self._checkpoints = CheckpointStore.of(context.run)
        self._slots = Slots(context.num_slots, context.fleet)
        self._balance = Balance(context.queue, context.fleet, context.num_workers)

    def hand_out(self, now: float) -> None:
        """Start a call on every idle worker that has something to do."""
        idle = [worker for worker in self._fleet.workers if worker.is_idle]
        for worker in idle:
            if worker.state != "draining":
                continue
            if self._queue.held_by(worker.id):
                self._fleet.drain(worker)
            else:
                self._fleet.retire(worker)
        for worker, assignments in self._dealt([worker for worker in idle if worker.state != "draining"], now):
            if self._queue.held_by(worker.id) or worker.orders.cancelled:
                orders = replace(worker.orders, assignments=assignments, num_pages=self._slots.num_pages(worker))
                self._fleet.work(worker, orders, SLICE_SECONDS)

    def order_relief(self, now: float) -> None:
        """Let the worker with the job that ends last hand others back, where the run ends much sooner then."""
        last = self._balance.of_last(now)
        if last is None or last.worker.orders.released:
            return
        for job_id in self._balance.too_many(last):
            last.worker.ask_back(job_id)

    def order_move(self, now: float) -> None:
        """Let a worker with several jobs hand one over to a worker without any, once no job waits any more."""
        counts = self._queue.counts()
        if counts["pending"] or not counts["running"]:
            return
        ready = [worker for worker in self._fleet.workers if worker.state == "ready"]
        held = [(worker, self._queue.held_by(worker.id)) for worker in ready]
        if all(records for _, records in held) or any(worker.orders.released for worker in ready):
            return  # nobody is without, or one is on its way
        job_speed = self._fleet.speed.tokens_per_second(now) / counts["running"]
        movable = [
            (num_left, worker, record.job_id)
            for worker, records in held
            if len(records) > 1
            for record in records
            if (num_left := self._num_left_to_move(record)) > job_speed * MIN_MOVE_SECONDS > 0
        ]
        if movable:
            _, worker, job_id = max(movable, key=lambda entry: entry[0])
            worker.ask_back(job_id)

    def _dealt(self, workers: list[Worker], now: float) -> Iterator[tuple[Worker, tuple[Assignment, ...]]]:
        """New jobs for workers, one after the other for whoever has the least left to do, while they take any."""
        dealt: list[list[Assignment]] = [[] for _ in workers]
        last = self._balance.of_last(now) if self._queue.counts()["pending"] else None
        takers = [(self._queue.num_left(worker.id), n) for n, worker in enumerate(workers)]
        heapify(takers)
        while takers:
            num_left, number = takers[0]
            is_spared = last is not None and last.worker is workers[number] and not self._balance.may_have_more(last)
            record = None if is_spared else self._next_for(workers[number], num_left, now)
            if record is None:
                heappop(takers)
            else:
                dealt[number].append(self._assignment(record, workers[number]))
                heapreplace(takers, (self._queue.num_left(workers[number].id), number))
        return zip(workers, map(tuple, dealt), strict=True)

    def _next_for(self, worker: Worker, num_left: int, now: float) -> JobRecord | None:
        """Take a job for a worker that has so many tokens left to draw, if it should have one more."""
        num_held = len(self._queue.held_by(worker.id))
        if self._balance.has_share(num_held, num_left) or self._slots.is_full(worker, num_held):
            return None
        has_room = partial(self._slots.has_room, worker, self._queue.growths(worker.id))
        return self._queue.take(worker.id, now, has_room)

    def _assignment(self, record: JobRecord, worker: Worker) -> Assignment:
        """Claim the next attempt at a job: whoever had it before can't touch the new attempt's files."""
        numerics = worker.info.numerics if worker.info else ""
        attempt = self._checkpoints.claim(record.job_id, worker.id, numerics)
        queue, job_id = self._queue, record.job_id
        num_tokens = queue.num_reported_tokens(job_id)
        self._context.display.note(JobStarted(record.job.name, worker.id, attempt, num_tokens))
        return Assignment(record, attempt, num_tokens, queue.num_shared_tokens(job_id), queue.seniority(job_id))

    def _num_left(self, record: JobRecord) -> int:
        return record.job.sampling.max_tokens - self._queue.num_reported_tokens(record.job_id)

    def _num_left_to_move(self, record: JobRecord) -> int:
        """Tokens that a job has left, 0 where that is too few for the move to pay."""
        num_done, num_left = self._queue.num_reported_tokens(record.job_id), self._num_left(record)
        return num_left if num_left >= MIN_SHARE_LEFT * (record.num_prompt_tokens + num_done) else 0
