"""Takes in workers' reports and losses: files first, then the queue."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.token_log import FoundLogs, PackedLogs
from swiftbatch.jobs.run.output_line import error_line, num_completion_tokens
from swiftbatch.jobs.run.run_records import in_parallel
from swiftbatch.jobs.storage.store import StoreError
from swiftbatch.metrics.counters import MEMORY_FULL
from swiftbatch.scheduler.cluster.ray_actors import NODE_DRAINED, STORE_FAILED
from swiftbatch.scheduler.display.events import (
    GpuLeftOut,
    JobCancelled,
    JobFinished,
    JobGivenUp,
    JobPutBack,
    JobStarted,
    WorkerLost,
    WorkerReady,
    WorkerStopping,
)
from swiftbatch.scheduler.driver.queue_loading import CANCELLED, with_results, write_cancelled
from swiftbatch.scheduler.driver.queued_job import QueuedJob
from swiftbatch.scheduler.driver.run_progress import DriverContext
from swiftbatch.scheduler.driver.worker_fleet import Event, Lost, Reported, Started, Worker
from swiftbatch.worker.session.work_messages import JobOutcome, WorkReport

Result = TypeVar("Result")

NUM_UNPACKED = 8  # lost workers unpacked at a time
MAX_VAIN_GPU_FAILURES = 16  # in a row without progress of a job; a job that breaks GPUs is found earlier
CANCELLED_AT_ONCE = 10_000  # bounds memory when a whole run is cancelled


class AttemptSettlement:
    """Records the fate of jobs in files, queue, counters and display."""

    def __init__(self, context: DriverContext) -> None:
        self._run, self._queue, self._attempts = context.run, context.queue, context.attempts
        self._counters, self._display = context.counters, context.display
        self._clock = context.clock
        self._checkpoints = CheckpointStore.of(context.run)
        self._cancelling: set[str] = set()  # ids to cancel once no worker has them

    def put_back(self, job_id: str, reason: str, message: str, num_lost: int = 1) -> None:
        """Requeue or give up a lost job, one of `num_lost` without progress; `reason` and `message` as in `Lost`."""
        if (job := self._still_to_do(job_id)) is None:
            return
        self._counters.num_preemptions[reason] += 1
        has_attempts_left = self._queue.lose(job_id, self._clock(), num_lost)
        self._attempts.note_strikes(job_id, job.strikes if has_attempts_left else None)
        if has_attempts_left:
            self._display.note(JobPutBack(job.name, reason, job.num_generated_tokens, is_lost=True))
        else:
            text = f"given up after {self._attempts.count(job_id)} attempts; the last one: {message}"
            self._give_up(job_id, "attempts_failed", text)

    def begin(self, worker: Worker, job_id: str) -> None:
        if job := self._queue.begin(job_id):
            num_attempts = self._attempts.note_begun(job_id)
            self._display.note(JobStarted(job.name, worker.id, num_attempts, job.num_generated_tokens))

    def take_back(self, job_id: str) -> None:
        """Requeue a reserved job that has not begun."""
        if self._still_to_do(job_id):
            self._attempts.give_back(job_id)
            self._queue.release(job_id)

    def begin_found(self, worker: Worker) -> None:
        """Record which reserved jobs of a lost worker began."""
        job_ids = list(self._queue.of(worker.id).reserve)
        if not job_ids:
            return
        for job_id, numbers in zip(job_ids, in_parallel(self._checkpoints.attempts, job_ids), strict=True):
            if self._attempts.newest(job_id) in numbers:
                self.begin(worker, job_id)

    def lose_backlog(self, worker: Worker, *, is_unblamed: bool) -> None:
        """Requeue the reserved jobs of a lost worker.

        These jobs are never reserved again, because one of them may kill its worker as soon as it begins.
        """
        for job in list(self._queue.of(worker.id).reserve.values()):
            if self._still_to_do(job.job_id):
                job.is_suspect |= not is_unblamed
                self._queue.release(job.job_id)

    def refuse(self, job_id: str, code: str, message: str) -> None:
        """Give a job up at once, because every attempt would fail."""
        if self._still_to_do(job_id):
            self._give_up(job_id, code, f"given up: {message}")

    def release(self, job_id: str, reason: str) -> None:
        """Requeue a released job; `reason` as in `Lost`."""
        if (job := self._still_to_do(job_id)) is None:
            return
        self._counters.num_preemptions[reason] += 1
        self._queue.release(job_id)
        self._display.note(JobPutBack(job.name, reason, job.num_generated_tokens, is_lost=False))

    def take_cancel_requests(self) -> None:
        """Cancel the jobs that users asked to cancel; jobs on workers are cancelled at the worker's next report."""
        is_whole_run, requested = self._run.cancel_requests()
        wanted = self._queue.unfinished() if is_whole_run else [job.job_id for job in self._queue.jobs(requested)]
        self._cancelling = set(wanted)
        self._cancel(self._cancelling - self._queue.handed_out())

    def cancel_held(self, worker: Worker) -> None:
        """Cancel a worker's jobs as requested and order it to drop them."""
        if not self._cancelling:
            return
        own = self._queue.of(worker.id)
        cancelled = self._cancelling.intersection({*own.running, *own.reserve})
        self._cancel(cancelled)
        worker.cancel(cancelled)

    def finish(self, job_id: str, num_generated_tokens: int) -> None:
        if job := self._queue.find(job_id):
            self._queue.finish(job_id, num_generated_tokens)
            self._attempts.finish(job_id)
            self._display.note(JobFinished(job.name, num_generated_tokens))

    def take_results(self, job_ids: Iterable[str]) -> None:
        asked = list(job_ids)
        for job_id, line in zip(asked, self._run.result_lines(asked) if asked else (), strict=True):
            if line is not None:
                self.finish(job_id, num_completion_tokens(line))

    def with_results(self, job_ids: Collection[str]) -> set[str]:
        return with_results(self._run, job_ids)

    def _still_to_do(self, job_id: str) -> QueuedJob | None:
        """Return the job, or None if it has a result or is cancelled."""
        if job_id in self._cancelling:
            self._cancel({job_id})
        return self._queue.find(job_id)

    def _cancel(self, job_ids: Iterable[str]) -> None:
        remaining = list(job_ids)
        for start in range(0, len(remaining), CANCELLED_AT_ONCE):
            jobs = self._queue.jobs(remaining[start : start + CANCELLED_AT_ONCE])
            write_cancelled(self._run, [job.entry for job in jobs])
            for job in jobs:
                self._queue.drop(job.job_id, "cancelled")
                self._counters.jobs_finished[CANCELLED] += 1
                self._display.note(JobCancelled(job.name))

    def _give_up(self, job_id: str, code: str, message: str) -> None:
        """Write the job's error; its log stays for `resume --retry-failed`."""
        if job := self._queue.find(job_id):
            self._run.write_error(job_id, error_line(job.entry, code, message))
            self._queue.drop(job_id, "failed")
            self._counters.jobs_finished["failed"] += 1
            self._display.note(JobGivenUp(job.name, message))


class ReportIntake:
    """Takes in the fleet's events and updates the queue."""

    def __init__(self, context: DriverContext, settlement: AttemptSettlement) -> None:
        self._queue, self._fleet = context.queue, context.fleet
        self._counters, self._display = context.counters, context.display
        self._spent = context.spent
        self._settlement = settlement
        self._lost_ids: set[str] = set()
        self.num_vain_gpu_failures = 0  # since a job ended or progressed
        self._logs = PackedLogs.of(context.run)
        self._pool = ThreadPoolExecutor(NUM_UNPACKED, "unpacks")
        self._reading: list[tuple[Future[FoundLogs], Lost]] = []  # logs of lost workers
        self._placing: list[tuple[Future[None], Lost]] = []

    def take_in(self, event: Event) -> None:
        """Handle one event. Raises StoreError if the store failed."""
        match event:
            case Started(worker, info):
                self._display.note(WorkerReady(worker.id, info.host, info.pid, info.start_seconds))
            case Reported(worker, report):
                self._take_in_report(worker, report)
            case Lost(worker, reason, message):
                if reason == STORE_FAILED and worker.drain_reason is None:
                    raise StoreError(message)
                self.num_vain_gpu_failures += bool(event.gpus)
                if self._left_by(worker) or self._queue.of(worker.id).reserve:
                    self._reading.append((self._pool.submit(self._logs.found, [worker.id]), event))
                else:
                    self._take_in_loss(event)

    def settle(self) -> None:
        """Requeue the jobs of lost workers once a thread moved their logs. Raises StoreError."""
        for found, lost in self._taken(self._reading):
            done = self._settlement.with_results({entry.job_id for entry in found.entries})
            self._placing.append((self._pool.submit(self._logs.put_in_place, found.without(done)), lost))
        for _, lost in self._taken(self._placing):
            self._take_in_loss(lost)

    def stop(self) -> None:
        """Stop the thread; a later resume moves the remaining logs."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _taken(self, under_way: list[tuple[Future[Result], Lost]]) -> list[tuple[Result, Lost]]:
        done = [(future, lost) for future, lost in under_way if future.done()]
        under_way[:] = [(future, lost) for future, lost in under_way if not future.done()]
        return [(future.result(), lost) for future, lost in done]

    def tokens_at_risk(self) -> dict[str, int]:
        """Return the tokens of running and lost jobs by name."""
        lost = [job for job_id in self._lost_ids if (job := self._queue.find(job_id))]
        self._lost_ids = {job.job_id for job in lost}
        return {job.name: job.num_generated_tokens for job in (*self._queue.running(), *lost)}

    def _take_in_report(self, worker: Worker, report: WorkReport) -> None:
        if report.counters is not None:
            self._counters.take_in(worker.id, report.counters)
        self._spent.num_tokens += report.num_generated_tokens
        self._settlement.take_results(each.job_id for each in report.of("failed", "refused", "released", "evicted"))
        reason = worker.drain_reason or ("worker_terminated" if report.is_draining else "migrated")
        for outcome in report.outcomes:
            self._take_in_outcome(worker, outcome, reason)
        self._count_fitting(worker, report)
        if self.num_vain_gpu_failures and self._gets_on(worker, report):
            self.num_vain_gpu_failures = 0
        if report.is_draining:
            self._take_leave(worker, reason)
        else:
            self._settlement.cancel_held(worker)

    def _gets_on(self, worker: Worker, report: WorkReport) -> bool:
        """Return whether a job of the worker has ended or progressed."""
        running = self._queue.of(worker.id).running.values()
        return bool(report.of("finished")) or any(job.has_progressed for job in running)

    def _take_in_outcome(self, worker: Worker, outcome: JobOutcome, reason: str) -> None:
        """Settle one outcome; `reason` is that of `Lost` for a released job."""
        settlement, job_id, num_tokens = self._settlement, outcome.job_id, outcome.num_generated_tokens
        if outcome.kind != "unbegun":
            settlement.begin(worker, job_id)
        match outcome.kind:
            case "running":
                self._queue.progress(job_id, num_tokens)
            case "ended":
                self._queue.end(job_id, num_tokens)
            case "finished":
                settlement.finish(job_id, num_tokens)
            case "failed":
                settlement.put_back(job_id, "attempt_failed", outcome.reason)
            case "refused":
                settlement.refuse(job_id, outcome.error_code, outcome.reason)
            case "released" | "evicted":
                self._queue.progress(job_id, num_tokens)
                settlement.release(job_id, reason if outcome.kind == "released" else MEMORY_FULL)
            case "unbegun":
                settlement.take_back(job_id)

    def _count_fitting(self, worker: Worker, report: WorkReport) -> None:
        """Record how many jobs a worker kept when memory ran out."""
        num_held = len(self._queue.of(worker.id).running)
        if report.of("evicted"):
            worker.num_fitting = num_held
        elif worker.num_fitting is not None and (report.of("ended") or num_held < worker.num_fitting):
            worker.num_fitting = None

    def _take_leave(self, worker: Worker, reason: str) -> None:
        """End a drained worker, and requeue its jobs."""
        if worker.drain_reason is None:
            self._display.note(WorkerStopping(worker.id, reason))
        for job in self._left_by(worker):
            self._settlement.release(job.job_id, reason)
        for job_id in list(self._queue.of(worker.id).reserve):
            self._settlement.take_back(job_id)
        self._fleet.retire(worker)

    def _take_in_loss(self, lost: Lost) -> None:
        """Requeue a lost worker's jobs, without strikes if it was draining or its GPU failed.

        Without its UUID, or if it is the last one, a job may be what makes the GPU fail.
        """
        worker, reason, message = lost.worker, lost.reason, lost.message
        is_unblamed = worker.drain_reason is not None or reason == NODE_DRAINED
        self._display.note(WorkerLost(worker.id, reason, message))
        self._counters.num_gpu_failures.update(lost.gpus)
        for gpu in lost.left_out:
            self._display.note(GpuLeftOut(gpu, self._fleet.gpu_failures[gpu], lost.message))
        self._settlement.begin_found(worker)
        left = self._left_by(worker)
        alive = [job for job in left if not job.has_ended]
        num_lost = max(sum(not job.has_progressed for job in alive), min(2, len(alive)))  # 1 only if it was alone
        for job in left:
            self._lost_ids.add(job.job_id)
            is_of_gpu = bool(lost.gpus) and not job.fails_gpus(lost.gpus) and not lost.is_last
            if job.has_ended or is_unblamed or is_of_gpu:
                self._settlement.release(job.job_id, worker.drain_reason or reason)
            else:
                self._settlement.put_back(job.job_id, reason, f"worker {worker.id} was lost: {message}", num_lost)
        self._settlement.lose_backlog(worker, is_unblamed=is_unblamed)

    def _left_by(self, worker: Worker) -> list[QueuedJob]:
        own = self._queue.of(worker.id)
        left = [*sorted(own.running), *sorted(own.unsealed)]
        self._settlement.take_results([*left, *own.reserve])
        return [job for job_id in left if (job := self._queue.find(job_id))]
