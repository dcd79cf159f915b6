"""Ends a job's attempt: with a result, back in the queue, given up, or cancelled. Files first, then the queue."""

from __future__ import annotations

import time
from collections.abc import Iterable

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.run.results import error_line
from swiftbatch.scheduler.display.job_events import JobCancelled, JobFinished, JobGivenUp, JobPutBack
from swiftbatch.scheduler.driver.backlog import CANCELLED, num_completion_tokens, write_cancelled
from swiftbatch.scheduler.driver.context import DriverContext
from swiftbatch.scheduler.driver.fleet import Worker


class Settlement:
    """Writes what became of jobs, and keeps queue, counters and display in step with it."""

    def __init__(self, context: DriverContext) -> None:
        self._run, self._queue = context.run, context.queue
        self._counters, self._display = context.counters, context.display
        self._checkpoints = CheckpointStore.of(context.run)
        self._cancelling: set[str] = set()  # job ids to cancel as soon as no worker has them

    def put_back(self, job_id: str, reason: str, message: str) -> None:
        """Queue a job whose attempt was lost, or give it up; `reason` and `message` as in `Lost`."""
        record = self._queue.record(job_id)
        if record is None or self._has_ended(job_id):
            return
        self._counters.num_preemptions[reason] += 1
        num_tokens = self._queue.num_reported_tokens(job_id)
        if self._queue.lose(job_id, time.monotonic()):
            self._display.note(JobPutBack(record.job.name, reason, num_tokens, is_lost=True))
        else:
            num_attempts = self._checkpoints.attempts(job_id)
            text = f"given up after {num_attempts} attempts; the last one: {message}"
            self._give_up(job_id, "attempts_failed", text)

    def refuse(self, job_id: str, code: str, message: str) -> None:
        """Give a job up at once: every attempt would end so; `code` and `message` as in `error_line`."""
        if not self._has_ended(job_id):
            self._give_up(job_id, code, f"given up: {message}")

    def release(self, job_id: str, reason: str) -> None:
        """Queue a job again that its worker gave up through no fault of the job; `reason` as in `Lost`."""
        record = self._queue.record(job_id)
        if record is None or self._has_ended(job_id):
            return
        self._counters.num_preemptions[reason] += 1
        self._queue.release(job_id)
        num_tokens = self._queue.num_reported_tokens(job_id)
        self._display.note(JobPutBack(record.job.name, reason, num_tokens, is_lost=False))

    def take_cancel_requests(self) -> None:
        """Cancel the jobs that users asked for, except those that a worker has: these wait for its next report."""
        is_whole_run, requested = self._run.cancel_requests()
        unfinished = set(self._queue.unfinished())
        self._cancelling = unfinished if is_whole_run else requested & unfinished
        self._cancel(self._cancelling.difference(record.job_id for record, _ in self._queue.running()))

    def cancel_held(self, worker: Worker) -> None:
        """Cancel those of a worker's jobs that are to be cancelled, and have it drop them."""
        cancelled = self._cancelling.intersection(record.job_id for record in self._queue.held_by(worker.id))
        self._cancel(cancelled)
        worker.cancel(cancelled)

    def finish(self, job_id: str, num_generated_tokens: int) -> None:
        """Count a job whose result is in the run folder."""
        if record := self._queue.record(job_id):
            self._queue.finish(job_id, num_generated_tokens)
            self._display.note(JobFinished(record.job.name, num_generated_tokens))

    def _has_ended(self, job_id: str) -> bool:
        """Return whether there is nothing left to queue: a result that is there counts, whoever wrote it."""
        if (line := self._run.result(job_id)) is not None:
            self.finish(job_id, num_completion_tokens(line))
            return True
        if job_id in self._cancelling:
            self._cancel({job_id})
            return True
        return False

    def _cancel(self, job_ids: Iterable[str]) -> None:
        records = [record for job_id in job_ids if (record := self._queue.record(job_id))]
        write_cancelled(self._run, records)
        for record in records:
            self._queue.drop(record.job_id, "cancelled")
            self._counters.jobs_finished[CANCELLED] += 1
            self._display.note(JobCancelled(record.job.name))

    def _give_up(self, job_id: str, code: str, message: str) -> None:
        """Dead-letter: the job's error goes to the run folder, its token log stays for `resume --retry-failed`."""
        if record := self._queue.record(job_id):
            self._run.write_error(job_id, error_line(record, code, message))
            self._queue.drop(job_id, "failed")
            self._counters.jobs_finished["failed"] += 1
            self._display.note(JobGivenUp(record.job.name, message))
