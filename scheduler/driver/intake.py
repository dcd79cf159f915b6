"""Takes in a worker's report, or its end, for the jobs that it had."""

from __future__ import annotations

from swiftbatch.jobs.storage.store import StoreError
from swiftbatch.scheduler.cluster.remote import STORE_FAILED
from swiftbatch.scheduler.display.events import WorkerLost, WorkerReady, WorkerStopping
from swiftbatch.scheduler.driver.context import DriverContext
from swiftbatch.scheduler.driver.fleet import Event, Lost, Reported, Started, Worker
from swiftbatch.scheduler.driver.settlement import Settlement
from swiftbatch.worker.session.work import WorkReport


class Intake:
    """Takes in what happens in the fleet, and keeps the queue in step with it."""

    def __init__(self, context: DriverContext, settlement: Settlement) -> None:
        self._queue, self._fleet = context.queue, context.fleet
        self._counters, self._display = context.counters, context.display
        self._spent = context.spent
        self._settlement = settlement
        self._lost_ids: set[str] = set()

    def take_in(self, event: Event) -> None:
        """Act on one event. Raises StoreError if the store has failed a worker that was to go on."""
        match event:
            case Started(worker, info):
                self._display.note(WorkerReady(worker.id, info.host, info.pid))
            case Reported(worker, report):
                self._take_in_report(worker, report)
            case Lost(worker, reason, message):
                if reason == STORE_FAILED and worker.drain_reason is None:
                    raise StoreError(message)
                self._take_in_loss(worker, reason, message)

    def tokens_at_risk(self) -> dict[str, int]:
        """The tokens of running and lost jobs by name: not all of them may be in a checkpoint."""
        lost = [record for job_id in self._lost_ids if (record := self._queue.record(job_id))]
        self._lost_ids = {record.job_id for record in lost}
        running = {record.job.name: num_tokens for record, num_tokens in self._queue.running()}
        return running | {record.job.name: self._queue.num_reported_tokens(record.job_id) for record in lost}

    def _take_in_report(self, worker: Worker, report: WorkReport) -> None:
        if report.counters is not None:
            self._counters.take_in(worker.id, report.counters)
        self._spent.num_tokens += report.num_generated_tokens
        for progress in (*report.progress, *report.released):
            self._queue.progress(progress.job_id, progress.num_generated_tokens)
        for progress in report.finished:
            self._settlement.finish(progress.job_id, progress.num_generated_tokens)
        for job_id, message in report.failed:
            self._settlement.put_back(job_id, "attempt_failed", message)
        for job_id, code, message in report.refused:
            self._settlement.refuse(job_id, code, message)
        reason = worker.drain_reason or ("worker_terminated" if report.is_draining else "migrated")
        for progress in report.released:
            self._settlement.release(progress.job_id, reason)
        if report.is_draining:
            self._take_leave(worker, reason)
        else:
            self._settlement.cancel_held(worker)

    def _take_leave(self, worker: Worker, reason: str) -> None:
        """End a worker that has drained; jobs that it had not taken in yet go back too."""
        if worker.drain_reason is None:
            self._display.note(WorkerStopping(worker.id, reason))
        for record in self._queue.held_by(worker.id):
            self._settlement.release(record.job_id, reason)
        self._fleet.retire(worker)

    def _take_in_loss(self, worker: Worker, reason: str, message: str) -> None:
        """Put a lost worker's jobs back. A worker that was to end anyway is no reason to blame them."""
        self._display.note(WorkerLost(worker.id, reason, message))
        for record in self._queue.held_by(worker.id):
            self._lost_ids.add(record.job_id)
            if worker.drain_reason is not None or reason == "node_drained":
                self._settlement.release(record.job_id, worker.drain_reason or reason)
            else:
                self._settlement.put_back(record.job_id, reason, f"worker {worker.id} was lost: {message}")
