"""What a worker's report, or its end, means for the jobs it had."""

from __future__ import annotations

import time

from jobs.job import JobRecord
from jobs.storage.store import StoreError
from metrics.counters import DriverCounters
from scheduler.display.display import Display
from scheduler.display.events import WorkerLost, WorkerReady, WorkerStopping
from scheduler.driver.fleet import Event, Fleet, Lost, Reported, Started, StoreFailed, Worker
from scheduler.driver.job_queue import JobQueue
from scheduler.driver.settlement import Settlement
from scheduler.driver.speed import Speed
from worker.session.work import WorkReport


class Intake:
    """Takes in what happens in the fleet, and keeps queue and workers in step with it."""

    def __init__(
        self,
        queue: JobQueue,
        fleet: Fleet,
        settlement: Settlement,
        display: Display,
        speed: Speed,
        counters: DriverCounters,
    ) -> None:
        self._queue = queue
        self._fleet = fleet
        self._settlement = settlement
        self._display = display
        self._speed = speed
        self._counters = counters
        self._lost_ids: set[str] = set()

    def take_in(self, event: Event) -> None:
        """Act on one event. Raises StoreError if the store has failed a worker that was to go on."""
        match event:
            case Started(worker, info):
                self._display.note(WorkerReady(worker.id, info.host, info.pid))
            case Reported(worker, report):
                self._take_in_report(worker, report)
            case Lost(worker, reason, message):
                self._take_in_loss(worker, reason, message)
            case StoreFailed(worker, message):
                if worker.drain_reason is None:
                    raise StoreError(message)
                self._take_in_loss(worker, "store_failed", message)

    def tokens_at_risk(self) -> dict[str, int]:
        """The tokens of running and lost jobs by `custom_id`: not all of them may be in a checkpoint."""
        lost = [(record, job_id) for job_id in self._lost_ids if (record := self._queue.record(job_id))]
        self._lost_ids = {job_id for _, job_id in lost}
        at_risk: list[tuple[JobRecord, int]] = [
            *self._queue.running(),
            *((record, self._queue.num_reported_tokens(job_id)) for record, job_id in lost),
        ]
        return {record.job.custom_id: num_tokens for record, num_tokens in at_risk}

    def _take_in_report(self, worker: Worker, report: WorkReport) -> None:
        for speed in (self._speed, worker.speed):
            speed.add(report.num_generated_tokens, time.monotonic())
        if report.counters is not None:
            self._counters.take_in(worker.id, report.counters)
        worker.released_ids.clear()
        for progress in (*report.progress, *report.released):
            self._queue.progress(progress.job_id, progress.num_generated_tokens)
        for progress in report.finished:
            worker.job_ids.discard(progress.job_id)
            self._settlement.finish(progress.job_id, progress.num_generated_tokens)
        for job_id, message in report.failed:
            worker.job_ids.discard(job_id)
            self._settlement.put_back(job_id, "attempt_failed", message)
        for job_id, code, message in report.refused:
            worker.job_ids.discard(job_id)
            self._settlement.refuse(job_id, code, message)
        reason = worker.drain_reason or ("worker_terminated" if report.is_draining else "migrated")
        for progress in report.released:
            worker.job_ids.discard(progress.job_id)
            self._settlement.release(progress.job_id, reason)
        if report.is_draining:
            self._take_leave(worker, reason)
            return
        worker.cancelled_ids |= self._settlement.cancel_held(worker.job_ids)
        worker.job_ids -= worker.cancelled_ids

    def _take_leave(self, worker: Worker, reason: str) -> None:
        """End a worker that has drained; jobs that it had not taken in yet go back too."""
        if worker.drain_reason is None:
            self._display.note(WorkerStopping(worker.id, reason))
        for job_id in sorted(worker.job_ids):
            self._settlement.release(job_id, reason)
        worker.job_ids.clear()
        self._fleet.retire(worker)

    def _take_in_loss(self, worker: Worker, reason: str, message: str) -> None:
        """Put a lost worker's jobs back. A worker that was to end anyway is no reason to blame them."""
        self._display.note(WorkerLost(worker.id, reason, message))
        self._lost_ids |= worker.job_ids
        for job_id in sorted(worker.job_ids):
            if worker.drain_reason is not None or reason == "node_drained":
                self._settlement.release(job_id, worker.drain_reason or reason)
            else:
                self._settlement.put_back(job_id, reason, f"worker {worker.id} was lost: {message}")
