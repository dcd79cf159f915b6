"""One worker's jobs: takes assignments in, runs the engine, keeps checkpoints, writes results. Knows nothing of Ray."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from jobs.checkpoints import CheckpointStore
from jobs.results import success_line
from jobs.run import Run
from jobs.store import StoreError
from metrics.exporter import EngineCollector, Labels, registry_of, serve
from worker import sequence as sequences
from worker.config import EngineConfig
from worker.drafters import create_drafter
from worker.engine import Engine
from worker.model_files import locate_model
from worker.stopping import cut_at_stop
from worker.target import TargetModel
from worker.text import TextCodec
from worker.work import Assignment, JobProgress, WorkReport

logger = logging.getLogger(__name__)

STATE_INTERVALS = 6  # token logs between two states of the drafter


@dataclass
class RunningJob:
    """An assignment with its sequence, and what the engine did for it in this attempt."""

    assignment: Assignment
    sequence: sequences.Sequence
    num_recovered_tokens: int
    started: float
    num_logged_tokens: int = 0
    state_written: float = 0.0  # `time.monotonic()`
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def job_id(self) -> str:
        return self.assignment.record.job_id

    @property
    def progress(self) -> JobProgress:
        return JobProgress(self.job_id, self.sequence.num_generated_tokens)

    def metrics(self) -> dict[str, float | int]:
        """Numbers for the result line; times and counts are those of the last attempt."""
        seconds = time.monotonic() - self.started
        num_new_tokens = self.sequence.num_generated_tokens - self.num_recovered_tokens
        drafts = max(1, self.num_drafts)
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "mean_acceptance_length": round(1 + self.num_accepted_tokens / drafts, 3),
            "ms_per_token": round(1000 * seconds / max(1, num_new_tokens), 3),
            "num_attempts": self.assignment.attempt,
            "num_resumes": self.assignment.attempt - 1,
            "num_recovered_tokens": self.num_recovered_tokens,
            "num_recomputed_tokens": max(0, self.assignment.num_reported_tokens - self.num_recovered_tokens),
        }


class WorkerSession:
    """A model on this machine and the jobs that run on it."""

    def __init__(self, config: EngineConfig, run_uri: str, worker_id: str, metrics_port: int | None = None) -> None:
        torch.set_num_threads(config.num_threads)
        files = locate_model(config.model)
        self._config = config
        self._run = Run.open(run_uri)
        self._checkpoints = CheckpointStore(self._run.store)
        self._codec = TextCodec(files)
        target = TargetModel.load(files, config.dtype, config.device)
        drafter = create_drafter(config.engine, target.vocab_size)
        self.engine = Engine(target, drafter, self._codec.decode)
        self._running: dict[str, RunningJob] = {}
        self._last_checkpoint = time.monotonic()
        self.metrics_address: str | None = None
        if metrics_port is not None:
            labels = Labels(model_name=config.model, drafter=config.engine, worker=worker_id)
            self.metrics_address, _ = serve(registry_of(EngineCollector(self.engine.counters, labels)), metrics_port)

    def work(self, assignments: Sequence[Assignment], seconds: float) -> WorkReport:
        """Take new jobs in, step all for about `seconds`, and report. One job's fault fails that job alone."""
        failed = [failure for assignment in assignments if (failure := self._take_in(assignment))]
        num_before = self.engine.counters.num_generation_tokens
        finished: list[JobProgress] = []
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            self._step()
            for job in [job for job in self._running.values() if job.sequence.finish_reason is not None]:
                self._finish(job, finished, failed)
            if time.monotonic() - self._last_checkpoint > self._config.checkpoint_seconds:
                self._checkpoint()
        num_generated = self.engine.counters.num_generation_tokens - num_before
        progress = tuple(job.progress for job in self._running.values())
        return WorkReport(progress, tuple(finished), tuple(failed), num_generated)

    def cancel(self, job_ids: Collection[str]) -> None:
        """Drop jobs without a result."""
        for job_id in set(job_ids) & set(self._running):
            self._drop(self._running[job_id])

    def _take_in(self, assignment: Assignment) -> tuple[str, str] | None:
        """Start a job where its token log ends; returns (job_id, reason) where that fails."""
        record = assignment.record
        try:
            prompt_ids = self._codec.encode_job(record.job)
            vocab_size, device = self.engine.target.vocab_size, self.engine.target.device
            sequence = sequences.Sequence(record.job_id, prompt_ids, record.job.sampling, vocab_size, device)
            recovered = self._checkpoints.read_tokens(record.job_id)[: record.job.sampling.max_tokens]
            sequence.extend(recovered)
            self.engine.start(sequence)
        except (ValueError, MemoryError, RuntimeError) as error:
            logger.exception("job %s could not be started", record.job_id)
            return record.job_id, f"{type(error).__name__}: {error}"
        if assignment.attempt > 1:
            self._resume(sequence, len(recovered), assignment)
        self._running[record.job_id] = RunningJob(assignment, sequence, len(recovered), time.monotonic())
        return None

    def _resume(self, sequence: sequences.Sequence, num_recovered: int, assignment: Assignment) -> None:
        """Give the drafter its state back. It steers drafts only, so a state that does not fit is no loss."""
        num_lost = max(0, assignment.num_reported_tokens - num_recovered)
        self.engine.counters.count_resume("replay", num_recovered, num_lost)
        checkpoint = self._checkpoints.read_state(sequence.sequence_id)
        try:
            if checkpoint is not None:
                self.engine.drafter.restore(sequence, checkpoint[1])
        except ValueError as error:
            logger.warning("drafter state of %s not used: %s", sequence.sequence_id, error)

    def _step(self) -> None:
        for sequence, verification in self.engine.step():
            job = self._running[sequence.sequence_id]
            job.num_drafts += verification.num_draft_tokens > 0
            job.num_draft_tokens += verification.num_draft_tokens
            job.num_accepted_tokens += verification.num_accepted_tokens

    def _finish(self, job: RunningJob, finished: list[JobProgress], failed: list[tuple[str, str]]) -> None:
        """Write a finished job's result, then forget its checkpoints."""
        record, sequence = job.assignment.record, job.sequence
        reason = sequence.finish_reason or ""
        output_ids = sequence.output_ids
        line = success_line(
            record,
            self._run.manifest.run_id,
            cut_at_stop(self._codec.decode(output_ids.tolist()), record.job.sampling.stop),
            reason,
            model=self._config.model,
            token_ids=output_ids.astype("uint32"),
            metrics=job.metrics(),
        )
        self._drop(job)
        try:
            self._run.write_result(job.job_id, line)
            self._checkpoints.clear(job.job_id)
        except StoreError as error:
            failed.append((job.job_id, str(error)))
            return
        finished.append(job.progress)
        self.engine.counters.count_finished(reason, time.monotonic() - job.started, len(output_ids))

    def _checkpoint(self) -> None:
        """Write the token log and the drafter's state of every job that moved; a failing store costs only freshness."""
        for job in self._running.values():
            output_ids = job.sequence.output_ids
            if len(output_ids) == job.num_logged_tokens:
                continue
            started = time.perf_counter()
            try:
                num_bytes = self._write_checkpoint(job)
            except StoreError as error:
                logger.warning("checkpoint of %s failed: %s", job.job_id, error)
                continue
            job.num_logged_tokens = len(output_ids)
            self.engine.counters.count_checkpoint(num_bytes, time.perf_counter() - started)
        self._last_checkpoint = time.monotonic()

    def _write_checkpoint(self, job: RunningJob) -> int:
        """Token log first: it alone is enough to resume; the bigger state less often. Returns the bytes written."""
        output_ids = job.sequence.output_ids.astype("uint32")
        num_bytes = self._checkpoints.write_tokens(job.job_id, job.assignment.attempt, output_ids)
        if time.monotonic() - job.state_written < STATE_INTERVALS * self._config.checkpoint_seconds:
            return num_bytes
        job.state_written = time.monotonic()
        state = self.engine.drafter.state(job.sequence)
        if state:
            num_bytes += self._checkpoints.write_state(job.job_id, job.assignment.attempt, len(output_ids), state)
        return num_bytes

    def _drop(self, job: RunningJob) -> None:
        del self._running[job.job_id]
        self.engine.stop(job.sequence)
