"""One worker's jobs: follows orders, runs the engine, checkpoints and writes results, without Ray."""

from __future__ import annotations

import copy
import gc
import logging
import math
import time
from collections.abc import Iterable
from typing import Any

import torch

from swiftbatch.jobs.checkpoints.checkpoint_files import AttemptRecord, AttemptStart
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs
from swiftbatch.jobs.checkpoints.kv_segments import State
from swiftbatch.jobs.checkpoints.token_log import PackedLogs, TokenLog, WorkerLogs
from swiftbatch.jobs.errors import GPUFailedError
from swiftbatch.jobs.job import unpacked
from swiftbatch.jobs.logprobs import shown_logprobs, shown_prompt_logprobs
from swiftbatch.jobs.run.output_line import success_line
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.retries import Retries
from swiftbatch.jobs.storage.store import StoreError
from swiftbatch.metrics.counters import EngineCounters
from swiftbatch.metrics.exporter import Labels, engine_families, registry_of, serve
from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.engine.job_sequence import sequence_of
from swiftbatch.worker.engine.known_scores import KnownScores
from swiftbatch.worker.engine.stopping import (
    answer_of,
    closed,
    echo_of,
    may_be_extended,
    may_rewind,
    rewind_distance,
    rewound,
)
from swiftbatch.worker.exactness.doctor_verdicts import exactness_of
from swiftbatch.worker.forward.hardware import gpu_failures
from swiftbatch.worker.forward.nvml import own_gpus
from swiftbatch.worker.forward.step_costs import step_costs_of
from swiftbatch.worker.kv.cache_room import CachedJob
from swiftbatch.worker.kv.kv_capacity import TOO_LONG, PagesError, TooLongError, check_folder
from swiftbatch.worker.sampling.draft_tree import Verification
from swiftbatch.worker.sampling.sampler import NOT_FINITE
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.token_masks import CONSTRAINT_REFUSED, ConstraintError
from swiftbatch.worker.session.checkpointing import Checkpointing, num_unwritten
from swiftbatch.worker.session.result_writer import Sealing
from swiftbatch.worker.session.resume import Resumer
from swiftbatch.worker.session.run_model import loaded_target, located_model
from swiftbatch.worker.session.running_job import RunningJob
from swiftbatch.worker.session.work_messages import Assignment, Backlog, JobOutcome, Orders, OutcomeKind, WorkReport
from swiftbatch.worker.text.spellings import spellings_in
from swiftbatch.worker.text.tokenizer import TextCodec

COUNTERS_SECONDS = 2.0  # a report without counters is cheaper
CATCH_UP_SECONDS = 1.0  # longest wait for checkpoints at a time
GPU_FULL = "the GPU's memory was full"

logger = logging.getLogger(__name__)


class WorkerSession:
    """The model on this machine, and the jobs that it runs.

    `work` and `drain` raise StoreError when the store has failed for good. They and the constructor raise
    GPUFailedError when the GPU has failed: its process must end.
    """

    @gpu_failures()
    def __init__(self, config: EngineConfig, run_uri: str, worker_id: str, metrics_host: str | None = None) -> None:
        torch.set_num_threads(config.num_threads)
        check_folder(config.kv_offload)
        counters = EngineCounters(checkpoint_interval_seconds=config.checkpoint_seconds)
        self._config, self._worker_id = config, worker_id
        self._run = Run.open(run_uri, Retries(config.store_retry_seconds, counters.count_store_retry))
        files = located_model(config.model, self._run)
        self._checkpoints, self._kept_logs = CheckpointStore.of(self._run), KeptLogs.of(self._run)
        self._sealing = Sealing(self._run, worker_id, config.checkpoint_seconds, config.checkpoint_tokens)
        self._codec = TextCodec(files, config.thinking_markers, lenient_schemas=config.lenient_schemas)
        target = loaded_target(config, files, self._run, self._codec.textless_ids)
        self.numerics, self.num_slots = target.numerics, target.num_slots
        self.num_free_positions = target.num_free_positions()
        room = self._room = target.cache_room(num_unwritten(config))
        self.pool_size, self.num_state_positions, self.held_positions = room.pool, room.num_beside, room.held
        costs = step_costs_of(target)
        drafter = create_drafter(config.engine, target, costs, config.draft_model, config.engine_options)
        self.engine = Engine(target, drafter, self._codec.output_text, counters, config.logprobs_mode)
        self._resumer = Resumer(self._checkpoints, costs, self.numerics)
        logs = WorkerLogs(PackedLogs.of(self._run), worker_id)
        self._checkpointing = Checkpointing(self._checkpoints, logs, config, self.engine)
        self._running: dict[str, RunningJob] = {}
        self._backlog, self._report = Backlog(), WorkReport()
        self._counted = -math.inf  # when counters were last reported
        self._must_drain = False
        self.metrics_address: str | None = None
        if metrics_host is not None:
            labels = Labels(model_name=config.model, drafter=config.engine, worker=worker_id)
            gpus = own_gpus()[: config.num_gpus_per_worker] if target.device.type == "cuda" else ()
            registry = registry_of(lambda: engine_families(counters, labels, [gpu.figures() for gpu in gpus]))
            self.metrics_address, _ = serve(registry, 0, host=metrics_host)

    @gpu_failures()
    def work(self, orders: Orders, seconds: float) -> WorkReport:
        """Follow the orders, step all jobs for about `seconds`, and report."""
        self._checkpointing.check()
        num_before = self.engine.counters.num_generation_tokens
        self._report = WorkReport()
        self._follow(orders)
        deadline = time.monotonic() + seconds
        while self._has_jobs() and time.monotonic() < deadline and not self._must_drain:
            self._advance()
            if not orders.seals and self._report.has_many_empty(len(self._running)):
                break
        if self._must_drain:
            self._hand_all_back(self._config.grace_seconds)
        is_last = self._must_drain or (orders.seals and not self._has_jobs())
        self._report.num_generated_tokens = self.engine.counters.num_generation_tokens - num_before
        return self._reported(self._sealing.flush() if is_last else self._sealing.sealed())

    def _follow(self, orders: Orders) -> None:
        """Drop cancelled jobs, hand back recalled and released ones, and start new ones."""
        self._drop(orders.cancelled)
        self._room.limit(orders.num_pages)
        self._note_unbegun(self._backlog.follow(orders))
        self._release("released", orders.released, self._config.grace_seconds)
        for assignment in orders.assignments:
            self._take_in(assignment)

    def _has_jobs(self) -> bool:
        return bool(self._running or self._backlog)

    def _advance(self) -> None:
        """Start reserve jobs in free places, and take one step with all jobs."""
        self._make_room()
        while (assignment := self._backlog.next(len(self._running), self._has_room)) is not None:
            self._take_in(assignment)
            if not self._can_fit():  # with lagging checkpoints, jobs keep more than expected
                self._make_room()
        if self._running and not (self._must_drain and not self._can_fit()):
            self._step()
        for job in [job for job in self._running.values() if job.sequence.finish_reason is not None]:
            self._end(job)
        self._checkpointing.put_due(self._running.values())
        self._sealing.seal_due()

    def _end(self, job: RunningJob) -> None:
        """Continue a job that rewinds or closes its thought; otherwise write its result."""
        if may_rewind(job.sequence):
            self._rewind(job)
            return
        if (again := closed(job.sequence, job.thinking)) is not None:
            self.engine.replace(again)
            job.sequence = again
            return
        may_go_on = may_be_extended(job.sequence, job.thinking)
        is_kept = self._config.keep_state and may_go_on
        if is_kept:
            self._checkpointing.keep(job, self._config.grace_seconds)
        self._drop([job.job_id])
        self._report.outcomes.append(self._finish(job, may_go_on, is_kept))

    def _reported(self, finished: list[JobOutcome]) -> WorkReport:
        report = self._report
        report.outcomes += [*finished, *(job.outcome("running") for job in self._running.values())]
        self._checkpointing.forget([outcome.job_id for outcome in finished])
        report.is_draining, report.counters = self._must_drain, self._due_counters()
        return report

    def _due_counters(self) -> EngineCounters | None:
        """Return all counters at intervals, else None, because they are the largest part of a report."""
        now = time.monotonic()
        if self._has_jobs() and now - self._counted < COUNTERS_SECONDS:
            return None
        self._counted = now
        return copy.deepcopy(self.engine.counters)

    @gpu_failures()
    def drain(self, seconds: float) -> WorkReport:
        """Checkpoint and hand back all jobs: token logs first, then as much state as `seconds` allow."""
        self._must_drain, self._report = True, WorkReport()
        self._hand_all_back(seconds)
        return self._reported(self._sealing.flush())

    def _hand_all_back(self, seconds: float) -> None:
        self._note_unbegun(self._backlog.give_up())
        self._sealing.seal()
        self._release("released", list(self._running), seconds)

    def _note_unbegun(self, job_ids: Iterable[str]) -> None:
        self._report.outcomes += [JobOutcome("unbegun", job_id) for job_id in job_ids]

    def request_drain(self) -> None:
        """Make the current or next `work` drain within the grace period; safe in a signal handler."""
        self._must_drain = True

    def _take_in(self, assignment: Assignment) -> None:
        try:
            with gpu_failures():
                job = self._start(assignment)
        except (StoreError, GPUFailedError):
            raise
        except (ValueError, MemoryError, RuntimeError) as error:
            self._report.outcomes.append(self._not_started(assignment, error))
            self.engine.discard(assignment.job_id)
        else:
            self._running[job.job_id] = job
            self._checkpointing.open(job)
            self.engine.counters.note_work(True)

    def _not_started(self, assignment: Assignment, error: Exception) -> JobOutcome:
        job_id = assignment.job_id
        match error:
            case TooLongError():  # too long for all workers that started with this one
                return JobOutcome("refused", job_id, reason=str(error), error_code=TOO_LONG)
            case ConstraintError():  # a driver of another version accepted these rules
                return JobOutcome("refused", job_id, reason=str(error), error_code=CONSTRAINT_REFUSED)
            case torch.OutOfMemoryError() if self._running:
                self._note_full(error)
                self._backlog.keep_to(len(self._running))
                return JobOutcome("evicted", job_id, assignment.num_reported_tokens, GPU_FULL)
            case PagesError():  # other jobs have grown since their last report
                self._backlog.keep_to(len(self._running))
                return JobOutcome("evicted", job_id, assignment.num_reported_tokens)
        logger.error("job %s could not be started", job_id, exc_info=error)
        return JobOutcome("failed", job_id, reason=f"{type(error).__name__}: {error}")

    def _start(self, assignment: Assignment) -> RunningJob:
        record, target, started = assignment.record, self.engine.target, time.monotonic()
        start = AttemptStart(
            worker_id=self._worker_id, claimed=time.time(), numerics=self.numerics, attempt=assignment.num_attempts
        )
        sequence, thinking = sequence_of(record, self._codec, target.vocab_size, target.device)
        if sequence.rules:  # a structure puts the prompt's words into quotes
            sequence.spellings = spellings_in(self._codec, unpacked(record.prompt_token_ids))
        cache = self.engine.new_cache(sequence.max_length, sequence.lora)
        if distance := rewind_distance(sequence):
            cache.retain(-distance)  # must precede loading, so that a loop's rewind finds its positions
        is_first = assignment.num_attempts == 1
        recovery = None if is_first else self._resumer.recover(sequence, cache, self._config.engine)
        num_top, prompt_ids = sequence.sampling.num_top_of_prompt, unpacked(record.prompt_token_ids)
        scores = None if num_top is None else KnownScores(prompt_ids, 1, num_top, target)
        job = RunningJob(
            assignment, sequence, cache, recovery, start, started=started, thinking=thinking, scores=scores
        )
        self.engine.start(sequence, cache, assignment.num_shared_tokens, thinking, scores)
        sequence.spellings = []  # drafters have learned them
        if scores is not None and sequence.finish_reason is not None:  # only its result was lost
            scores.read(cache)
        if recovery is not None:
            self._count_resume(job)
            self._restore_drafter(sequence, recovery.drafter_state)
        return job

    def _count_resume(self, job: RunningJob) -> None:
        record = job.resume_record()
        self.engine.counters.count_resume(record.kind, record.num_recovered_tokens, record.num_recomputed_tokens)
        self._checkpoints.begin(job.job_id, job.assignment.attempt, job.start)
        self._checkpoints.write_resume(job.job_id, job.assignment.attempt, record)

    def _restore_drafter(self, sequence: Sequence, state: State | None) -> None:
        """Restore a drafter's state, or ignore one that does not fit."""
        try:
            if state is not None:
                self.engine.drafter.restore(sequence, state)
        except ValueError as error:
            logger.warning("drafter state of job %s not used: %s", sequence.sequence_id, error)

    def _make_room(self) -> None:
        """Hand back jobs without room for another step, and let the checkpoints of the other jobs catch up."""
        running = self._running.values()
        jobs = self._without_room()
        if jobs and gc.collect():  # frees caches in reference cycles
            jobs = self._without_room()
        if jobs:
            self._evict(jobs)
        while not self._can_fit() and not self._must_drain:  # caches keep unwritten positions
            if self._checkpointing.catch_up(running, CATCH_UP_SECONDS):
                break
        self.engine.counters.count_pages(self._room.num_taken(self._cached()), self._room.num_pages)

    def _without_room(self) -> list[RunningJob]:
        """Return the jobs that must leave before the next step: the youngest.

        Age counts from a job's first attempt on any worker, so two jobs cannot evict each other in turns.
        """
        youngest = self._youngest()
        return youngest[: self._room.num_without_room([job.cached for job in youngest])]

    def _youngest(self) -> list[RunningJob]:
        return sorted(self._running.values(), key=lambda job: job.assignment.seniority, reverse=True)

    def _evict(self, jobs: Iterable[RunningJob], reason: str = "") -> None:
        self._release("evicted", [job.job_id for job in jobs], self._config.grace_seconds, reason)
        self._backlog.keep_to(len(self._running))

    def _can_fit(self) -> bool:
        return self._room.can_fit(self._cached())

    def _has_room(self, assignment: Assignment) -> bool:
        growth = assignment.growth(assignment.num_prompt_tokens, assignment.num_reported_tokens)
        return self._room.has_room(self._cached(), growth)

    def _cached(self) -> list[CachedJob]:
        return [job.cached for job in self._running.values()]

    def _step(self) -> None:
        num_jobs, num_before = len(self._running), self.engine.counters.num_steps
        for sequence, verification in self._stepped():
            job = self._running[sequence.sequence_id]
            job.count(verification)
            if job.recovery is not None and not job.has_advanced:
                # repeated with the seconds until the first new token
                self._checkpoints.write_resume(job.job_id, job.assignment.attempt, job.resume_record())
            job.has_advanced = True
        self._report.count_steps(num_jobs, self.engine.counters.num_steps - num_before)

    def _stepped(self) -> list[tuple[Sequence, Verification]]:
        """Take a step; if the GPU's memory is full, put the youngest job back and take the step again.

        Raises torch.OutOfMemoryError if memory is full again, or the step cannot be taken again.
        """
        try:
            with gpu_failures():
                return self.engine.step()
        except torch.OutOfMemoryError as error:
            if self.engine.is_torn:
                raise
            self._note_full(error)
        # behind the handler, because the error's frames hold tensors
        gc.collect()
        torch.cuda.empty_cache()
        if len(self._running) > 1:
            self._evict(self._youngest()[:1], GPU_FULL)
        return self.engine.step()

    def _note_full(self, error: Exception) -> None:
        self.engine.counters.num_out_of_memory += 1
        logger.warning("%s: %s", GPU_FULL, error)

    def _rewind(self, job: RunningJob) -> None:
        again = rewound(job.sequence)
        self._checkpointing.rewind(job, again)
        self.engine.replace(again)
        job.sequence = again

    def _finish(self, job: RunningJob, may_go_on: bool, is_kept: bool) -> JobOutcome:
        """Queue an ended job's result, unless a newer attempt exists.

        To save reads, a job that ends before its first write does not look for newer attempts. If its worker was given
        up meanwhile, such a job may get two equal results.
        """
        sequence = job.sequence
        if sequence.error is not None:
            return job.outcome("refused", sequence.error, sequence.error_code or NOT_FINITE)
        is_known = job.has_files or job.num_logged_tokens > 0
        attempts = job.history(self._checkpoints.history(job.job_id) if is_known else ())
        newest = max(attempts, key=lambda each: each.number)
        if newest.number > job.assignment.attempt:
            self.engine.counters.num_stale_attempt_rejections += 1
            self._checkpointing.forget([job.job_id])
            return job.outcome("failed", f"attempt {job.start.attempt} was overtaken by attempt {newest.attempt}")
        if may_go_on:  # must precede the result, which says that it exists
            log = TokenLog(sequence.output_ids.astype("uint32"), sequence.rewinds)
            self._kept_logs.write(job.job_id, log, sequence.kept_logprobs)
        line = self._result_line(job, attempts)
        self._sealing.add(job.job_id, line, clears=job.has_files and not is_kept)
        seconds, reason = time.monotonic() - job.started, sequence.finish_reason or ""
        self.engine.counters.count_finished(reason, seconds, sequence.num_generated_tokens)
        return job.outcome("ended")

    def _result_line(self, job: RunningJob, attempts: list[AttemptRecord]) -> dict[str, Any]:
        record, codec, sampling = job.assignment.record, self._codec, job.sequence.sampling
        output_ids, kept = job.sequence.output_ids.astype("uint32"), job.sequence.kept_logprobs
        answer = answer_of(job.sequence, record.job, codec, job.thinking)
        exactness = exactness_of(self._run.manifest.exactness, [a.numerics for a in attempts if a.numerics])
        prompt = None if job.scores is None else job.scores.of_prompt()
        echo, num_top = echo_of(record.job, unpacked(record.prompt_token_ids), codec), sampling.prompt_logprobs
        of_prompt = None if prompt is None or num_top is None else shown_prompt_logprobs(prompt, num_top, codec)
        return success_line(
            record,
            self._run.manifest.run_id,
            answer.text,
            job.sequence.finish_reason or "",
            model=self._config.model,
            system_fingerprint=self._run.manifest.fingerprint,
            token_ids=output_ids,
            metrics=job.metrics(attempts, exactness),
            logprobs=None if kept is None else shown_logprobs(record.job, output_ids, kept, codec, prompt, echo),
            reasoning=answer.reasoning,
            calls=answer.calls,
            ignored_keywords=codec.ignored_keywords(sampling),
            prompt_logprobs=of_prompt,
        )

    def _release(self, kind: OutcomeKind, job_ids: Iterable[str], seconds: float, reason: str = "") -> None:
        jobs = [self._running[job_id] for job_id in job_ids if job_id in self._running]
        if jobs:
            self._checkpointing.flush(jobs, seconds)
        self._drop(job.job_id for job in jobs)
        self._report.outcomes += [job.outcome(kind, reason) for job in jobs]

    def _drop(self, job_ids: Iterable[str]) -> None:
        for job_id in list(job_ids):
            if job := self._running.pop(job_id, None):
                self._checkpointing.close(job)
                self.engine.stop(job.sequence)
        self.engine.counters.note_work(bool(self._running))
