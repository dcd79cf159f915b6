"""Takes in a worker's report, or its end, and ends the attempts of its jobs: files first, then the queue.

A job then has a result, is back in the queue, given up, or cancelled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.token_log import FoundLogs, PackedLogs
from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.jobs.run.output_line import error_line
from swiftbatch.jobs.run.output_line_parsing import num_completion_tokens
from swiftbatch.jobs.run.run_records import NUM_READERS
from swiftbatch.jobs.storage.store import StoreError
from swiftbatch.metrics.counters import MEMORY_FULL
from swiftbatch.scheduler.cluster.ray_actors import STORE_FAILED
from swiftbatch.scheduler.display.events import (
    JobCancelled,
    JobFinished,
    JobGivenUp,
    JobPutBack,
    JobStarted,
    WorkerLost,
    WorkerReady,
    WorkerStopping,
)
from swiftbatch.scheduler.driver.driver_state import DriverContext
from swiftbatch.scheduler.driver.queue_loading import CANCELLED, with_results, write_cancelled
from swiftbatch.scheduler.driver.worker_fleet import Event, Lost, Reported, Started, Worker
from swiftbatch.worker.session.work_messages import WorkReport

Result = TypeVar("Result")

NUM_UNPACKED = 8  # lost workers at a time
CANCELLED_AT_ONCE = 10_000  # jobs in memory: a whole run may be cancelled


class AttemptSettlement:
    """Writes what became of jobs, and keeps queue, counters and display in step with it."""

    def __init__(self, context: DriverContext) -> None:
        self._run, self._queue, self._attempts = context.run, context.queue, context.attempts
        self._counters, self._display = context.counters, context.display
        self._clock = context.clock
        self._checkpoints = CheckpointStore.of(context.run)
        self._cancelling: set[str] = set()  # job ids to cancel as soon as no worker has them

    def put_back(self, job_id: str, reason: str, message: str) -> None:
        """Queue a job whose attempt was lost, or give it up; `reason` and `message` as in `Lost`."""
        entry = self._queue.entry(job_id)
        if entry is None or self._has_ended(job_id):
            return
        self._counters.num_preemptions[reason] += 1
        num_tokens = self._queue.num_reported_tokens(job_id)
        has_attempts_left = self._queue.lose(job_id, self._clock())
        self._attempts.note_strikes(job_id, self._queue.strikes(job_id) if has_attempts_left else None)
        if has_attempts_left:
            self._display.note(JobPutBack(entry.name, reason, num_tokens, is_lost=True))
        else:
            text = f"given up after {self._attempts.count(job_id)} attempts; the last one: {message}"
            self._give_up(job_id, "attempts_failed", text)

    def begin(self, worker: Worker, job_id: str) -> None:
        """Note that a worker has begun with a job of its reserve."""
        if entry := self._queue.begin(job_id):
            num_attempts, num_tokens = self._attempts.note_begun(job_id), self._queue.num_reported_tokens(job_id)
            self._display.note(JobStarted(entry.name, worker.id, num_attempts, num_tokens))

    def take_back(self, job_id: str) -> None:
        """Queue a job again that a worker had in its reserve, and has not begun, as it says."""
        if self._queue.entry(job_id) is not None and not self._has_ended(job_id):
            self._attempts.give_back(job_id)
            self._queue.release(job_id)

    def begin_found(self, worker: Worker) -> None:
        """Note which jobs of a lost worker's reserve had begun: those whose attempts have left files."""
        job_ids = [entry.job_id for entry in self._queue.backlog_of(worker.id)]
        if not job_ids:
            return
        with ThreadPoolExecutor(NUM_READERS) as pool:
            for job_id, numbers in zip(job_ids, pool.map(self._checkpoints.attempts, job_ids), strict=True):
                if self._attempts.newest(job_id) in numbers:
                    self.begin(worker, job_id)

    def lose_backlog(self, worker: Worker, *, is_unblamed: bool) -> None:
        """Queue the jobs again that a lost worker had in its reserve: nobody knows whether they had begun.

        None is blamed, but none waits in a reserve again: one that ends its worker at its very beginning would never
        be known.
        """
        for entry in self._queue.backlog_of(worker.id):
            if not self._has_ended(entry.job_id):
                if not is_unblamed:
                    self._queue.suspect(entry.job_id)
                self._queue.release(entry.job_id)

    def refuse(self, job_id: str, code: str, message: str) -> None:
        """Give a job up at once: every attempt would end so; `code` and `message` as in `error_line`."""
        if not self._has_ended(job_id):
            self._give_up(job_id, code, f"given up: {message}")

    def release(self, job_id: str, reason: str) -> None:
        """Queue a job again that its worker gave up through no fault of the job; `reason` as in `Lost`."""
        entry = self._queue.entry(job_id)
        if entry is None or self._has_ended(job_id):
            return
        self._counters.num_preemptions[reason] += 1
        self._queue.release(job_id)
        num_tokens = self._queue.num_reported_tokens(job_id)
        self._display.note(JobPutBack(entry.name, reason, num_tokens, is_lost=False))

    def take_cancel_requests(self) -> None:
        """Cancel the jobs that users asked for, except those that a worker has: these wait for its next report."""
        is_whole_run, requested = self._run.cancel_requests()
        wanted = self._queue.unfinished() if is_whole_run else [e.job_id for e in self._queue.entries(requested)]
        self._cancelling = set(wanted)
        self._cancel(self._cancelling - self._queue.handed_out())

    def cancel_held(self, worker: Worker) -> None:
        """Cancel those of a worker's jobs that are to be cancelled, and have it drop them."""
        if not self._cancelling:
            return
        entries = [*self._queue.held_by(worker.id), *self._queue.backlog_of(worker.id)]
        cancelled = self._cancelling.intersection(entry.job_id for entry in entries)
        self._cancel(cancelled)
        worker.cancel(cancelled)

    def finish(self, job_id: str, num_generated_tokens: int) -> None:
        """Count a job whose result is in the run folder."""
        if entry := self._queue.entry(job_id):
            self._queue.finish(job_id, num_generated_tokens)
            self._attempts.finish(job_id)
            self._display.note(JobFinished(entry.name, num_generated_tokens))

    def take_results(self, job_ids: Iterable[str]) -> None:
        """Count those of some jobs that have a result, whoever wrote it: nothing is left to queue."""
        asked = list(job_ids)
        for job_id, line in zip(asked, self._run.result_lines(asked) if asked else (), strict=True):
            if line is not None:
                self.finish(job_id, num_completion_tokens(line))

    def with_results(self, job_ids: Collection[str]) -> set[str]:
        """Return those of some jobs that have a result, whoever wrote it."""
        return with_results(self._run, job_ids)

    def _has_ended(self, job_id: str) -> bool:
        """Return whether there is nothing left to queue, since the job is to be cancelled."""
        if job_id in self._cancelling:
            self._cancel({job_id})
            return True
        return False

    def _cancel(self, job_ids: Iterable[str]) -> None:
        remaining = list(job_ids)
        for start in range(0, len(remaining), CANCELLED_AT_ONCE):
            entries = self._queue.entries(remaining[start : start + CANCELLED_AT_ONCE])
            write_cancelled(self._run, entries)
            for entry in entries:
                self._queue.drop(entry.job_id, "cancelled")
                self._counters.jobs_finished[CANCELLED] += 1
                self._display.note(JobCancelled(entry.name))

    def _give_up(self, job_id: str, code: str, message: str) -> None:
        """Dead-letter: the job's error goes to the run folder, its token log stays for `resume --retry-failed`."""
        if entry := self._queue.entry(job_id):
            self._run.write_error(job_id, error_line(entry, code, message))
            self._queue.drop(job_id, "failed")
            self._counters.jobs_finished["failed"] += 1
            self._display.note(JobGivenUp(entry.name, message))


class ReportIntake:
    """Takes in what happens in the fleet, and keeps the queue in step with it."""

    def __init__(self, context: DriverContext, settlement: AttemptSettlement) -> None:
        self._queue, self._fleet = context.queue, context.fleet
        self._counters, self._display = context.counters, context.display
        self._spent = context.spent
        self._settlement = settlement
        self._lost_ids: set[str] = set()
        self._logs = PackedLogs.of(context.run)
        self._pool = ThreadPoolExecutor(NUM_UNPACKED, "unpacks")
        self._reading: list[tuple[Future[FoundLogs], Lost]] = []  # the token logs of lost workers
        self._placing: list[tuple[Future[None], Lost]] = []

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
                if self._left_by(worker) or self._queue.backlog_of(worker.id):
                    self._reading.append((self._pool.submit(self._logs.found, [worker.id]), event))
                else:
                    self._take_in_loss(worker, reason, message)

    def settle(self) -> None:
        """Go on with lost workers: put their jobs back once their token logs are where others look for them.

        To read and write these takes a store's time, for which the loop does not wait. Raises StoreError.
        """
        for found, lost in self._taken(self._reading):
            done = self._settlement.with_results({entry.job_id for entry in found.entries})
            self._placing.append((self._pool.submit(self._logs.put_in_place, found.without(done)), lost))
        for _, lost in self._taken(self._placing):
            self._take_in_loss(lost.worker, lost.reason, lost.message)

    def stop(self) -> None:
        """Begin nothing more: what is not in place yet is found by whoever resumes the run."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _taken(self, under_way: list[tuple[Future[Result], Lost]]) -> list[tuple[Result, Lost]]:
        """Take what is done from a list."""
        done = [(future, lost) for future, lost in under_way if future.done()]
        under_way[:] = [(future, lost) for future, lost in under_way if not future.done()]
        return [(future.result(), lost) for future, lost in done]

    def tokens_at_risk(self) -> dict[str, int]:
        """The tokens of running and lost jobs by name: not all of them may be in a checkpoint."""
        lost = [entry for job_id in self._lost_ids if (entry := self._queue.entry(job_id))]
        self._lost_ids = {entry.job_id for entry in lost}
        running = {entry.name: num_tokens for entry, num_tokens in self._queue.running()}
        return running | {entry.name: self._queue.num_reported_tokens(entry.job_id) for entry in lost}

    def _take_in_report(self, worker: Worker, report: WorkReport) -> None:
        if report.counters is not None:
            self._counters.take_in(worker.id, report.counters)
        self._spent.num_tokens += report.num_generated_tokens
        self._take_progress(worker, report)
        left = [progress.job_id for progress in (*report.released, *report.evicted)]
        self._settlement.take_results([*left, *(job_id for job_id, *_ in (*report.failed, *report.refused))])
        for job_id, message in report.failed:
            self._settlement.put_back(job_id, "attempt_failed", message)
        for job_id, code, message in report.refused:
            self._settlement.refuse(job_id, code, message)
        self._take_back_evicted(worker, report)
        for job_id in report.unbegun:
            self._settlement.take_back(job_id)
        reason = worker.drain_reason or ("worker_terminated" if report.is_draining else "migrated")
        for progress in report.released:
            self._settlement.release(progress.job_id, reason)
        if report.is_draining:
            self._take_leave(worker, reason)
        else:
            self._settlement.cancel_held(worker)

    def _take_progress(self, worker: Worker, report: WorkReport) -> None:
        """Note how far a worker's jobs are, those first that it began by itself."""
        for job_id in report.begun:
            self._settlement.begin(worker, job_id)
        for progress in (*report.progress, *report.released, *report.evicted):
            self._queue.progress(progress.job_id, progress.num_generated_tokens)
        for progress in report.ended:
            self._queue.end(progress.job_id, progress.num_generated_tokens)
        for progress in report.finished:
            self._settlement.finish(progress.job_id, progress.num_generated_tokens)

    def _take_back_evicted(self, worker: Worker, report: WorkReport) -> None:
        """Queue jobs again that a worker's memory did not hold, and note how many it holds."""
        for progress in report.evicted:
            self._settlement.release(progress.job_id, MEMORY_FULL)
        num_held = self._queue.num_held_by(worker.id)
        if report.evicted:
            worker.num_fitting = num_held
        elif worker.num_fitting is not None and (report.ended or num_held < worker.num_fitting):
            worker.num_fitting = None

    def _take_leave(self, worker: Worker, reason: str) -> None:
        """End a worker that has drained; jobs that it had not taken in yet go back too."""
        if worker.drain_reason is None:
            self._display.note(WorkerStopping(worker.id, reason))
        for entry in self._left_by(worker):
            self._settlement.release(entry.job_id, reason)
        for entry in self._queue.backlog_of(worker.id):
            self._settlement.take_back(entry.job_id)
        self._fleet.retire(worker)

    def _take_in_loss(self, worker: Worker, reason: str, message: str) -> None:
        """Put a lost worker's jobs back. It is no reason to blame them if it was to end anyway, or they had ended."""
        ended = {entry.job_id for entry in self._queue.unsealed_by(worker.id)}
        is_unblamed = worker.drain_reason is not None or reason == "node_drained"
        self._display.note(WorkerLost(worker.id, reason, message))
        self._settlement.begin_found(worker)
        for entry in self._left_by(worker):
            self._lost_ids.add(entry.job_id)
            if is_unblamed or entry.job_id in ended:
                self._settlement.release(entry.job_id, worker.drain_reason or reason)
            else:
                self._settlement.put_back(entry.job_id, reason, f"worker {worker.id} was lost: {message}")
        self._settlement.lose_backlog(worker, is_unblamed=is_unblamed)

    def _left_by(self, worker: Worker) -> list[JobEntry]:
        """The jobs that a worker leaves unfinished, now that it is gone; its reserve may have results, too."""
        left = [*self._queue.held_by(worker.id), *self._queue.unsealed_by(worker.id)]
        self._settlement.take_results(entry.job_id for entry in (*left, *self._queue.backlog_of(worker.id)))
        return [entry for entry in left if self._queue.entry(entry.job_id) is not None]
