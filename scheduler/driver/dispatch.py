"""Gives workers jobs, as many as each has room for, and has one hand a job over to an idle one at the end of a run."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.scheduler.display.job_events import JobStarted
from swiftbatch.scheduler.driver.claims import Claims
from swiftbatch.scheduler.driver.context import DriverContext
from swiftbatch.scheduler.driver.fleet import Worker
from swiftbatch.worker.kernels.sizes import MOST_SLOTS
from swiftbatch.worker.session.work import Assignment

if TYPE_CHECKING:
    from swiftbatch.scheduler.driver.fleet import Fleet

MEMORY_SHARE = 0.8  # of what is free, for caches; drafts and checkpoints on their way need some, too
SLICE_SECONDS = 0.5  # the work of a worker between two reports
MIN_MOVE_SECONDS = 10.0  # a job that ends sooner stays where it is
MIN_SHARE_LEFT = 0.25  # of the tokens so far: to load or replay them costs, and the rest has to make up for it


class Slots:
    """Says whether a worker takes one more job beside those that it has."""

    def __init__(self, num_slots: int | None, fleet: Fleet) -> None:
        """`num_slots` is what the user asked for, None to leave it to the worker's memory."""
        self._num_slots = num_slots
        self._fleet = fleet

    def has_room(self, worker: Worker, held: list[JobEntry], entry: JobEntry) -> bool:
        """Tell whether a worker with the jobs `held` takes another one, and has room for one as long as any of them."""
        most = worker.info.num_slots if worker.info else None  # a GPU's, made when it started
        if self._num_slots is not None or most is not None:
            return len(held) < min(number for number in (self._num_slots, most) if number is not None)
        return not held or (len(held) < MOST_SLOTS and self._fits_one_more(worker, held, entry))

    def _fits_one_more(self, worker: Worker, held: list[JobEntry], entry: JobEntry) -> bool:
        num_beside = worker.info.num_state_positions if worker.info else 0
        lengths = [each.max_length + num_beside for each in held]
        return sum(lengths) + max(entry.max_length + num_beside, *lengths) <= self._num_positions(worker)

    def _num_positions(self, worker: Worker) -> float:
        """The worker's share of its machine's memory; who is still to start may come to the same machine."""
        if worker.info is None:
            return 0.0
        nodes = [each.info.node_id if each.info else worker.info.node_id for each in self._fleet.workers]
        return MEMORY_SHARE * worker.info.num_free_positions / nodes.count(worker.info.node_id)


class Dispatcher:
    """Gives every idle worker its next slice, with new jobs where it has room; has those drain that are to end."""

    def __init__(self, context: DriverContext) -> None:
        self._context = context
        self._queue, self._fleet = context.queue, context.fleet
        self._claims = Claims(CheckpointStore.of(context.run))
        self._slots = Slots(context.num_slots, context.fleet)
        self._bodies = context.run.job_bodies(self._queue.places())

    def hand_out(self, now: float) -> None:
        """Start a call on every idle worker that has something to do; those with the fewest jobs get theirs first."""
        share = math.ceil(self._queue.num_unfinished / self._context.num_workers)
        idle = [worker for worker in self._fleet.workers if worker.is_idle]
        for worker in sorted(idle, key=lambda worker: len(self._queue.held_by(worker.id))):
            if worker.state == "draining":
                self._end(worker)
            else:
                self._take_jobs(worker, share, now)
        self._claims.wait()
        for worker in idle:
            if worker.state != "draining":
                self._begin_slice(worker)

    def stop(self) -> None:
        """Claim nothing more."""
        self._claims.stop()

    def order_move(self, now: float) -> None:
        """Let a worker with several jobs hand one over to a worker without any, once no job waits any more."""
        counts = self._queue.counts()
        if counts["pending"] or not counts["running"]:
            return
        ready = [worker for worker in self._fleet.workers if worker.state == "ready"]
        held = [(worker, self._queue.held_by(worker.id)) for worker in ready]
        if all(entries for _, entries in held) or any(worker.orders.released for worker in ready):
            return  # nobody is without, or one is on its way
        job_speed = self._fleet.speed.tokens_per_second(now) / counts["running"]
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
        if self._queue.held_by(worker.id):
            self._fleet.drain(worker)
        else:
            self._fleet.retire(worker)

    def _take_jobs(self, worker: Worker, share: int, now: float) -> None:
        """Have jobs claimed for a worker, until it has its share of the jobs or no room for more."""
        numerics = worker.info.numerics if worker.info else ""
        held = self._queue.held_by(worker.id)
        has_room = partial(self._slots.has_room, worker, held)
        while len(held) < share and (entry := self._queue.take(worker.id, now, has_room)) is not None:
            self._claims.ask(entry.job_id, worker.id, numerics)
            held.append(entry)

    def _begin_slice(self, worker: Worker) -> None:
        """Have a worker go on with its jobs, and with those that are claimed by now."""
        held = {entry.job_id: entry for entry in self._queue.held_by(worker.id)}
        made = self._claims.made(worker.id)
        assignments = [
            self._assignment(held[job_id], worker, attempt) for job_id, attempt in made.items() if job_id in held
        ]
        has_jobs = bool(held.keys() - self._claims.under_way(worker.id))
        if has_jobs or worker.orders.cancelled:
            self._fleet.work(worker, replace(worker.orders, assignments=tuple(assignments)), SLICE_SECONDS)

    def _assignment(self, entry: JobEntry, worker: Worker, attempt: int) -> Assignment:
        """A claimed attempt at a job: whoever had it before can't touch the new attempt's files."""
        num_tokens = self._queue.num_reported_tokens(entry.job_id)
        self._context.display.note(JobStarted(entry.name, worker.id, attempt, num_tokens))
        record, num_shared = self._bodies.record(entry), self._queue.num_shared_tokens(entry.job_id)
        return Assignment(record, attempt, num_tokens, num_shared)

    def _num_left_to_move(self, entry: JobEntry) -> int:
        """Tokens that a job has left, 0 where that is too few for the move to pay."""
        num_done = self._queue.num_reported_tokens(entry.job_id)
        num_left = entry.max_tokens - num_done
        return num_left if num_left >= MIN_SHARE_LEFT * (entry.num_prompt_tokens + num_done) else 0
