"""The driver's loop: hand jobs out, take reports in, put back what a lost worker had.

Everything the driver knows is in the run folder as well: it may die at any moment and another one goes on.
"""

from __future__ import annotations

import time

from jobs.checkpoints import CheckpointStore
from jobs.job import JobRecord
from jobs.run import Run, WorkerStatus
from jobs.status import RunState
from metrics.counters import DriverCounters
from scheduler.fleet import Event, Fleet, Lost, Reported, Started, Worker
from scheduler.heartbeat import Heartbeat, Speed, refuse_if_taken
from scheduler.job_queue import JobQueue
from scheduler.progress import Display
from scheduler.settlement import Settlement
from worker.work import Assignment, WorkReport

SLICE_SECONDS = 0.5  # of work between two reports
WAIT_SECONDS = 0.2
MAX_FAILED_STARTS = 3


class DriverError(RuntimeError):
    """The run can't go on; the text is one line for the user."""


class Driver:
    """Runs the jobs of one run to their end."""

    def __init__(
        self,
        run: Run,
        queue: JobQueue,
        fleet: Fleet,
        display: Display,
        counters: DriverCounters,
        *,
        num_workers: int,
        num_slots: int,
    ) -> None:
        self._run = run
        self._queue = queue
        self._fleet = fleet
        self._display = display
        self._counters = counters
        self._num_workers = num_workers
        self._num_slots = num_slots
        self._checkpoints = CheckpointStore(run.store)
        self._heartbeat = Heartbeat(run)
        self._speed = Speed(time.monotonic())
        self._settlement = Settlement(run, queue, counters, display)
        self._is_stopping = False

    def request_stop(self) -> None:
        """Ask the loop to end soon; safe in a signal handler."""
        self._is_stopping = True

    def run(self) -> RunState:
        """Run until no job is left, or until asked to stop. Raises DriverError, RunTakenError, StoreError."""
        refuse_if_taken(self._run)
        state: RunState = "interrupted"
        self._beat("running")
        self._display.note("starting workers: each loads Python, torch and the model, which takes some seconds")
        try:
            while self._queue.unfinished() and not self._is_stopping:
                self._step()
            state = self._end_state()
        finally:
            self._fleet.stop()
            self._queue.stop_running()
            self._beat(state)
        return state

    def _step(self) -> None:
        now = time.monotonic()
        self._fleet.fill(min(self._num_workers, len(self._queue.unfinished())), now)
        self._hand_out(now)
        events = self._fleet.wait(WAIT_SECONDS, now)
        for event in events:
            self._take_in(event)
        if not events and all(worker.is_idle for worker in self._fleet.workers):
            time.sleep(WAIT_SECONDS)  # every job left waits for its next attempt
        if self._heartbeat.is_due(time.monotonic()):
            self._settlement.take_cancel_requests({j for worker in self._fleet.workers for j in worker.job_ids})
            self._beat("running")

    def _hand_out(self, now: float) -> None:
        """Give every idle worker its next slice, with new jobs where it has room."""
        share = -(-len(self._queue.unfinished()) // self._num_workers)
        for worker in self._fleet.workers:
            if not worker.is_idle or worker.info is None:
                continue
            assignments = []
            while len(worker.job_ids) < min(self._num_slots, share):
                record = self._queue.take(worker.job_ids, now)
                if record is None:
                    break
                worker.job_ids.add(record.job_id)
                assignments.append(self._assignment(record, worker))
            if worker.job_ids or worker.cancelled_ids:
                self._fleet.work(worker, assignments, SLICE_SECONDS)

    def _assignment(self, record: JobRecord, worker: Worker) -> Assignment:
        """Claim the next attempt at a job: whoever had it before can't touch the new attempt's files."""
        attempt = self._checkpoints.claim(record.job_id, worker.id)
        return Assignment(record, attempt, self._queue.num_reported_tokens(record.job_id))

    def _take_in(self, event: Event) -> None:
        match event:
            case Started(worker):
                self._display.note(f"worker {worker.id} is ready")
            case Reported(worker, report):
                self._take_in_report(worker, report)
            case Lost(worker, reason, message):
                self._take_in_loss(worker, reason, message)

    def _take_in_report(self, worker: Worker, report: WorkReport) -> None:
        self._speed.add(report.num_generated_tokens, time.monotonic())
        for progress in report.progress:
            self._queue.progress(progress.job_id, progress.num_generated_tokens)
        for progress in report.finished:
            worker.job_ids.discard(progress.job_id)
            self._queue.finish(progress.job_id, progress.num_generated_tokens)
        for job_id, message in report.failed:
            worker.job_ids.discard(job_id)
            self._settlement.put_back(job_id, "attempt_failed", message)
        worker.cancelled_ids |= self._settlement.cancel_held(worker.job_ids)
        worker.job_ids -= worker.cancelled_ids

    def _take_in_loss(self, worker: Worker, reason: str, message: str) -> None:
        self._display.note(f"worker {worker.id} is lost: {message}")
        for job_id in sorted(worker.job_ids):
            self._settlement.put_back(job_id, reason, f"worker {worker.id} was lost: {message}")
        any_started = any(other.info for other in self._fleet.workers)
        if self._fleet.num_failed_starts >= MAX_FAILED_STARTS and not any_started:
            raise DriverError(f"no worker starts, {MAX_FAILED_STARTS} tries: {message}")

    def _end_state(self) -> RunState:
        if self._queue.unfinished():
            return "interrupted"
        is_whole_run, _ = self._run.cancel_requests()
        self._run.clear_cancel()
        return "cancelled" if is_whole_run else "finished"

    def _beat(self, state: RunState) -> None:
        self._counters.jobs = self._queue.counts()
        speed = self._speed.tokens_per_second(time.monotonic())
        workers = tuple(self._status(worker) for worker in self._fleet.workers if worker.info is not None)
        queue = self._queue
        progress = self._heartbeat.beat(
            state, queue.counts(), queue.num_generated_tokens, queue.num_tokens_left, speed, workers
        )
        self._display.update(progress, queue.running(), queue.num_tokens_left)

    def _status(self, worker: Worker) -> WorkerStatus:
        assert worker.info is not None
        records = [self._queue.record(job_id) for job_id in sorted(worker.job_ids)]
        custom_ids = tuple(record.job.custom_id for record in records if record is not None)
        info = worker.info
        return WorkerStatus(
            id=worker.id, host=info.host, pid=info.pid, jobs=custom_ids, metrics_address=info.metrics_address
        )
