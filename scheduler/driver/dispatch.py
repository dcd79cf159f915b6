"""Which worker gets which job, and at the end of a run, which worker hands one over to an idle one."""

from __future__ import annotations

import math

from jobs.checkpoints.store import CheckpointStore
from jobs.job import JobRecord
from scheduler.display.display import Display
from scheduler.display.job_events import JobStarted
from scheduler.driver.fleet import Fleet, Worker
from scheduler.driver.job_queue import JobQueue
from worker.session.work import Assignment, Orders

SLICE_SECONDS = 0.5  # of work between two reports
MIN_MOVE_SECONDS = 10.0  # a job that ends sooner stays where it is
MIN_SHARE_LEFT = 0.25  # of the tokens so far: to load or replay them costs, and the rest has to make up for it


class Dispatcher:
    """Gives every idle worker its next slice, with new jobs where it has room."""

    def __init__(
        self,
        queue: JobQueue,
        fleet: Fleet,
        checkpoints: CheckpointStore,
        display: Display,
        num_workers: int,
        num_slots: int,
    ) -> None:
        self._queue = queue
        self._fleet = fleet
        self._checkpoints = checkpoints
        self._display = display
        self._num_workers = num_workers
        self._num_slots = num_slots

    def hand_out(self, now: float) -> None:
        """Start a slice on every idle worker that has something to do; those with the fewest jobs get theirs first."""
        share = math.ceil(self._queue.num_unfinished / self._num_workers)
        ready = [worker for worker in self._fleet.workers if worker.is_idle and worker.takes_work]
        for worker in sorted(ready, key=lambda worker: len(worker.job_ids)):
            assignments = self._assignments(worker, min(self._num_slots, share), now)
            if worker.job_ids or worker.cancelled_ids:
                orders = Orders(tuple(assignments), tuple(worker.cancelled_ids), tuple(worker.released_ids))
                worker.cancelled_ids = set()
                self._fleet.work(worker, orders, SLICE_SECONDS)

    def order_move(self, tokens_per_second: float) -> None:
        """Where nothing waits any more, let a worker with several jobs hand one over to a worker without any."""
        counts = self._queue.counts()
        workers = [worker for worker in self._fleet.workers if worker.takes_work]
        if counts["pending"] or not counts["running"] or all(worker.job_ids for worker in workers):
            return
        if any(worker.released_ids for worker in workers):
            return  # one is on its way
        job_speed = tokens_per_second / counts["running"]
        movable = [
            (num_left, worker, job_id)
            for worker in workers
            if len(worker.job_ids) > 1
            for job_id in sorted(worker.job_ids)
            if (num_left := self._num_left_to_move(job_id)) > job_speed * MIN_MOVE_SECONDS > 0
        ]
        if movable:
            _, worker, job_id = max(movable, key=lambda entry: entry[0])
            worker.released_ids.add(job_id)

    def _assignments(self, worker: Worker, num_jobs: int, now: float) -> list[Assignment]:
        """New jobs for a worker, until it has `num_jobs`."""
        assignments: list[Assignment] = []
        while len(worker.job_ids) < num_jobs and (record := self._queue.take(worker.job_ids, now)):
            worker.job_ids.add(record.job_id)
            assignments.append(self._assignment(record, worker))
        return assignments

    def _assignment(self, record: JobRecord, worker: Worker) -> Assignment:
        """Claim the next attempt at a job: whoever had it before can't touch the new attempt's files."""
        numerics = worker.info.numerics if worker.info else ""
        attempt = self._checkpoints.claim(record.job_id, worker.id, numerics)
        num_tokens = self._queue.num_reported_tokens(record.job_id)
        self._display.note(JobStarted(record.job.custom_id, worker.id, attempt, num_tokens))
        return Assignment(record, attempt, num_tokens)

    def _num_left_to_move(self, job_id: str) -> int:
        """Tokens that a job has left, 0 where that is too few for the move to pay."""
        record = self._queue.record(job_id)
        if record is None:
            return 0
        num_done = self._queue.num_reported_tokens(job_id)
        num_left = record.job.sampling.max_tokens - num_done
        return num_left if num_left >= MIN_SHARE_LEFT * (record.num_prompt_tokens + num_done) else 0
