"""Gives workers jobs, as many as each has room for, and has one hand a job over to an idle one at the end of a run.

A worker gets a job once an attempt at it is claimed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heapreplace

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.scheduler.display.job_events import JobStarted
from swiftbatch.scheduler.driver.balance import Balance
from swiftbatch.scheduler.driver.context import DriverContext
from swiftbatch.scheduler.driver.slots import Slots
from swiftbatch.scheduler.driver.worker_fleet import Worker
from swiftbatch.worker.session.work import Assignment

NUM_CLAIMERS = 32
PATIENCE_SECONDS = 0.05  # of the loop: a local disk is done by then, so that a worker need not wait for another turn

SLICE_SECONDS = 0.5  # the work of a worker between two reports
MIN_MOVE_SECONDS = 10.0  # a job that ends sooner stays where it is
MIN_SHARE_LEFT = 0.25  # of the tokens so far: to load or replay them costs, and the rest has to make up for it


class Claims:
    """Claims attempts at jobs beside the driver's loop, many at a time: a store takes its time for each.

    An attempt is claimed by a file of its own that no two claims can both have made. The loop goes on meanwhile with
    reports and heartbeats, and a worker hears of a job once its claim is there.
    """

    def __init__(self, checkpoints: CheckpointStore) -> None:
        self._checkpoints = checkpoints
        self._pool = ThreadPoolExecutor(NUM_CLAIMERS, "claims")
        self._asked: defaultdict[str, dict[str, Future[int]]] = defaultdict(dict)  # by worker and job
        self._under_way: dict[str, Future[int]] = {}  # the newest of each job

    def ask(self, job_id: str, worker_id: str, numerics: str) -> None:
        """Begin to claim the next attempt at a job for a worker."""
        claim = self._pool.submit(self._claim, self._under_way.get(job_id), job_id, worker_id, numerics)
        self._asked[worker_id][job_id] = self._under_way[job_id] = claim

    def wait(self) -> None:
        """Wait a moment for what is under way."""
        if self._under_way:
            wait(self._under_way.values(), PATIENCE_SECONDS)
            self._under_way = {job_id: claim for job_id, claim in self._under_way.items() if not claim.done()}

    def under_way(self, worker_id: str) -> Collection[str]:
        """The ids of the jobs whose attempts are still to be claimed for a worker."""
        return self._asked.get(worker_id, {}).keys()

    def made(self, worker_id: str) -> dict[str, int]:
        """The attempts at jobs that were claimed for a worker since the last call. Raises StoreError."""
        asked = self._asked.pop(worker_id, {})
        if waiting := {job_id: claim for job_id, claim in asked.items() if not claim.done()}:
            self._asked[worker_id] = waiting
        return {job_id: claim.result() for job_id, claim in asked.items() if job_id not in waiting}

    def stop(self) -> None:
        """Claim nothing more; what is under way is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _claim(self, before: Future[int] | None, job_id: str, worker_id: str, numerics: str) -> int:
        if before is not None:  # of a worker that was lost: an object store may give two at once the same number
            wait([before])
        return self._checkpoints.claim(job_id, worker_id, numerics)


class Dispatcher:
    """Gives every idle worker its next slice, with new jobs where it has room; has those drain that are to end."""

    def __init__(self, context: DriverContext) -> None:
        self._context = context
        self._queue, self._fleet = context.queue, context.fleet
        self._claims = Claims(CheckpointStore.of(context.run))
        self._slots = Slots(context.num_slots, context.fleet)
        self._balance = Balance(context.queue, context.fleet, context.num_workers)
        self._bodies = context.run.job_bodies(self._queue.places())

    def hand_out(self, now: float) -> None:
        """Start a call on every idle worker that has something to do."""
        idle = list(self._fleet.idle)
        staying = [worker for worker in idle if worker.state != "draining"]
        for worker in idle:
            if worker.state == "draining":
                self._end(worker)
        self._deal(staying, now)
        self._claims.wait()
        for worker in staying:
            self._begin_slice(worker)

    def stop(self) -> None:
        """Claim nothing more."""
        self._claims.stop()

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

    def _deal(self, workers: Sequence[Worker], now: float) -> None:
        """Have jobs claimed for workers, one after the other for whoever has the least left to do, while any is taken.

        The worker with the job that ends last gets no more than let it end in time.
        """
        last = self._balance.of_last(now) if self._queue.counts()["pending"] else None
        takers = [(self._queue.num_left(worker.id), number) for number, worker in enumerate(workers)]
        heapify(takers)
        while takers:
            num_left, number = takers[0]
            worker = workers[number]
            is_spared = last is not None and last.worker is worker and not self._balance.may_have_more(last)
            entry = None if is_spared else self._next_for(worker, num_left, now)
            if entry is None:
                heappop(takers)
                continue
            self._claims.ask(entry.job_id, worker.id, worker.info.numerics if worker.info else "")
            heapreplace(takers, (num_left + entry.max_tokens, number))

    def _next_for(self, worker: Worker, num_left: int, now: float) -> JobEntry | None:
        """Take a job for a worker that has so many tokens left to draw, if it should have one more."""
        num_held = len(self._queue.held_by(worker.id))
        if self._balance.has_share(num_held, num_left) or self._slots.is_full(worker, num_held):
            return None
        has_room = partial(self._slots.has_room, worker, self._queue.growths(worker.id))
        return self._queue.take(worker.id, now, has_room)

    def _begin_slice(self, worker: Worker) -> None:
        """Have a worker go on with its jobs, and with those that are claimed by now.

        It writes the results that it has at once where it gets no more jobs: those that wait are others'.
        """
        held = {entry.job_id: entry for entry in self._queue.held_by(worker.id)}
        made = self._claims.made(worker.id)
        assignments = [
            self._assignment(held[job_id], worker, attempt) for job_id, attempt in made.items() if job_id in held
        ]
        under_way = self._claims.under_way(worker.id)
        has_jobs = bool(held.keys() - under_way)
        is_done = not held and bool(self._queue.unsealed_by(worker.id))
        if has_jobs or is_done or worker.orders.cancelled:
            num_pages = self._slots.num_pages(worker)
            seals = not self._queue.counts()["pending"] or is_done
            orders = replace(worker.orders, assignments=tuple(assignments), num_pages=num_pages, seals=seals)
            self._fleet.work(worker, orders, SLICE_SECONDS)

    def _assignment(self, entry: JobEntry, worker: Worker, attempt: int) -> Assignment:
        """A claimed attempt at a job: whoever had it before can't touch the new attempt's files."""
        queue, job_id = self._queue, entry.job_id
        num_tokens = queue.num_reported_tokens(job_id)
        self._context.display.note(JobStarted(entry.name, worker.id, attempt, num_tokens))
        shared, seniority = queue.num_shared_tokens(job_id), queue.seniority(job_id)
        return Assignment(self._bodies.record(entry), attempt, num_tokens, shared, seniority)

    def _num_left_to_move(self, entry: JobEntry) -> int:
        """Tokens that a job has left, 0 where that is too few for the move to pay."""
        num_done = self._queue.num_reported_tokens(entry.job_id)
        num_left = entry.max_tokens - num_done
        return num_left if num_left >= MIN_SHARE_LEFT * (entry.num_prompt_tokens + num_done) else 0
