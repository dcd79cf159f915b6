"""Gives workers jobs, as many as each has room for, and has one hand a job over to an idle one at the end of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heapreplace

from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.scheduler.display.job_events import JobStarted
from swiftbatch.scheduler.driver.balance import Balance
from swiftbatch.scheduler.driver.context import DriverContext
from swiftbatch.scheduler.driver.slots import Slots
from swiftbatch.scheduler.driver.worker_fleet import Worker
from swiftbatch.worker.session.work import Assignment

SLICE_SECONDS = 0.5  # the work of a worker between two reports
MIN_MOVE_SECONDS = 10.0  # a job that ends sooner stays where it is
MIN_SHARE_LEFT = 0.25  # of the tokens so far: to load or replay them costs, and the rest has to make up for it


class Dispatcher:
    """Gives every idle worker its next slice, with new jobs where it has room; has those drain that are to end."""

    def __init__(self, context: DriverContext) -> None:
        self._context = context
        self._queue, self._fleet, self._attempts = context.queue, context.fleet, context.attempts
        self._slots = Slots(context.num_slots, context.fleet)
        self._balance = Balance(context.queue, context.fleet, context.num_workers)
        self._bodies = context.run.job_bodies(self._queue.places())

    def hand_out(self, now: float) -> None:
        """Start a call on every idle worker that has something to do."""
        idle = [worker for worker in self._fleet.workers if worker.is_idle]
        staying = [worker for worker in idle if worker.state != "draining"]
        for worker in idle:
            if worker.state == "draining":
                self._end(worker)
        dealt = self._deal(staying, now)
        for worker in staying:
            self._begin_slice(worker, dealt.get(worker.id, ()))

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
        if all(entries for _, entries in held) or any(worker.orders.released for worker in ready):
            return  # nobody is without, or one is on its way
        job_speed = self._fleet.speed.tokens_per_second(now) / max(1, sum(len(entries) for _, entries in held))
        movable = [
            (num_left, worker, entry.job_id)
            for worker, entries in held
            if len(entries) > 1
            for entry in entries
            if (num_left := self._num_left_to_move(entry)) > job_speed * MIN_MOVE_SECONDS > 0
        ]
        if movable:
            _, worker, job_id = max(movable, key=lambda entry: entry[0])
            worker.ask_back(job_id)

    def _end(self, worker: Worker) -> None:
        if self._queue.held_by(worker.id) or self._queue.unsealed_by(worker.id):
            self._fleet.drain(worker)
        else:
            self._fleet.retire(worker)

    def _deal(self, workers: Sequence[Worker], now: float) -> dict[str, list[JobEntry]]:
        """Take jobs for workers, one after the other for whoever has the least left to do, while any is taken.

        The worker with the job that ends last gets no more than let it end in time.
        """
        last = self._balance.of_last(now) if self._queue.counts()["pending"] else None
        takers = [(self._queue.num_left(worker.id), number) for number, worker in enumerate(workers)]
        heapify(takers)
        dealt: defaultdict[str, list[JobEntry]] = defaultdict(list)  # by worker
        while takers:
            num_left, number = takers[0]
            worker = workers[number]
            is_spared = last is not None and last.worker is worker and not self._balance.may_have_more(last)
            entry = None if is_spared else self._next_for(worker, num_left, now)
            if entry is None:
                heappop(takers)
                continue
            dealt[worker.id].append(entry)
            heapreplace(takers, (num_left + entry.max_tokens, number))
        return dealt

    def _next_for(self, worker: Worker, num_left: int, now: float) -> JobEntry | None:
        """Take a job for a worker that has so many tokens left to draw, if it should have one more."""
        num_held = len(self._queue.held_by(worker.id))
        if self._balance.has_share(num_held, num_left) or self._slots.is_full(worker, num_held):
            return None
        has_room = partial(self._slots.has_room, worker, self._queue.growths(worker.id))
        return self._queue.take(worker.id, now, has_room)

    def _begin_slice(self, worker: Worker, dealt: Sequence[JobEntry]) -> None:
        """Have a worker go on with its jobs, and with those that are `dealt` to it.

        It writes the results that it has at once where it gets no more jobs: those that wait are others'.
        """
        has_jobs, has_results = bool(self._queue.held_by(worker.id)), bool(self._queue.unsealed_by(worker.id))
        if has_jobs or has_results or worker.orders.cancelled:
            assignments = tuple(self._assignment(entry, worker) for entry in dealt)
            num_pages = self._slots.num_pages(worker)
            seals = not self._queue.counts()["pending"] or not has_jobs
            orders = replace(worker.orders, assignments=assignments, num_pages=num_pages, seals=seals)
            self._fleet.work(worker, orders, SLICE_SECONDS)

    def _assignment(self, entry: JobEntry, worker: Worker) -> Assignment:
        """The next attempt at a job: whoever had it before can't touch the new attempt's files."""
        queue, job_id = self._queue, entry.job_id
        number, num_attempts = self._attempts.begin(job_id)
        num_tokens = queue.num_reported_tokens(job_id)
        self._context.display.note(JobStarted(entry.name, worker.id, num_attempts, num_tokens))
        shared, seniority = queue.num_shared_tokens(job_id), queue.seniority(job_id)
        return Assignment(self._bodies.record(entry), number, num_attempts, num_tokens, shared, seniority)

    def _num_left_to_move(self, entry: JobEntry) -> int:
        """Tokens that a job has left, 0 where that is too few for the move to pay."""
        num_done = self._queue.num_reported_tokens(entry.job_id)
        num_left = entry.max_tokens - num_done
        return num_left if num_left >= MIN_SHARE_LEFT * (entry.num_prompt_tokens + num_done) else 0
