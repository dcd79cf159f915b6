"""A session that counts instead of decoding, with the real run folder and token log.

The `custom_id` decides: `fails-*` always fails, `refused-*` is refused, `kills-*` ends its worker at token 30,
`unlogged-*` only logs at a drain or release, `storeless-*` finds the store broken at token 30, `stuck-*` never ends a
slice after token 30, `dies-*` ends its worker at a release.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from swiftbatch.jobs.checkpoints.checkpoint_files import AttemptStart
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.output_line import success_line
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.store import StoreError
from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.model.model_files import OtherModelError
from swiftbatch.worker.session.result_writer import Sealing
from swiftbatch.worker.session.work_messages import Assignment, Backlog, JobOutcome, Orders, OutcomeKind, WorkReport

TOKENS_PER_SLICE = 10


@dataclass
class CountingJob:
    """An assignment and its tokens so far."""

    assignment: Assignment
    ids: list[int]
    num_recovered: int

    @property
    def custom_id(self) -> str:
        return self.assignment.record.job.custom_id

    def outcome(self, kind: OutcomeKind, reason: str = "", error_code: str = "") -> JobOutcome:
        return JobOutcome(kind, self.assignment.job_id, len(self.ids), reason, error_code)


class CountingSession:
    """Generates token `seed + position`, ten a slice."""

    metrics_address = None
    numerics = "counting"
    num_free_positions = 1_000_000
    num_state_positions = 0
    held_positions = None
    num_slots = pool_size = None

    def __init__(self, config: EngineConfig, run_uri: str, worker_id: str, metrics_host: str | None = None) -> None:
        self._run, self._worker_id = Run.open(run_uri), worker_id
        self._checkpoints = CheckpointStore.of(self._run)
        self._sealing = Sealing(self._run, worker_id, config.checkpoint_seconds, config.checkpoint_tokens)
        self._running: dict[str, CountingJob] = {}
        self._backlog = Backlog()
        self._must_drain = False

    def work(self, orders: Orders, seconds: float) -> WorkReport:
        for job_id in orders.cancelled:
            self._running.pop(job_id, None)
        self._report = WorkReport([JobOutcome("unbegun", job_id) for job_id in self._backlog.follow(orders)])
        self._release(orders.released)
        if self._must_drain:
            return self._drained()
        for assignment in orders.assignments:
            self._take_in(assignment)
        while (begun := self._next()) is not None:
            self._take_in(begun)
        time.sleep(0.05)
        self._report.count_steps(len(self._running), 1)
        self._report.num_generated_tokens = sum(self._advance(job) for job in self._running.values())
        for job in [
            job for job in self._running.values() if len(job.ids) == job.assignment.record.job.sampling.max_tokens
        ]:
            self._finish(job)
        self._sealing.seal_due()
        if self._must_drain:
            return self._drained()
        for job in [job for job in self._running.values() if job.custom_id.startswith("refused")]:
            del self._running[job.assignment.job_id]
            self._report.outcomes.append(job.outcome("refused", "its numbers are none", "logits_not_finite"))
        is_last = orders.seals and not self._running and not self._backlog
        self._report.outcomes += self._sealing.flush() if is_last else self._sealing.sealed()
        self._report.outcomes += [job.outcome("running") for job in self._running.values()]
        return self._report

    def drain(self, seconds: float) -> WorkReport:
        self._must_drain, self._report = True, WorkReport()
        return self._drained()

    def request_drain(self) -> None:
        self._must_drain = True

    def _drained(self) -> WorkReport:
        self._release(list(self._running))
        self._report.outcomes += [JobOutcome("unbegun", job_id) for job_id in self._backlog.give_up()]
        self._report.outcomes += self._sealing.flush()
        self._report.is_draining = True
        return self._report

    def _next(self) -> Assignment | None:
        return self._backlog.next(len(self._running), lambda _: True)

    def _take_in(self, assignment: Assignment) -> None:
        record = assignment.record
        if record.job.custom_id.startswith("fails"):
            self._report.outcomes.append(JobOutcome("failed", record.job_id, reason="it always fails"))
            return
        start = AttemptStart(
            worker_id=self._worker_id, claimed=time.time(), numerics=self.numerics, attempt=assignment.num_attempts
        )
        self._checkpoints.begin(record.job_id, assignment.attempt, start)
        recovered = [int(token) for token in self._checkpoints.read_log(record.job_id).token_ids]
        self._running[record.job_id] = CountingJob(assignment, recovered, len(recovered))

    def _advance(self, job: CountingJob) -> int:
        sampling = job.assignment.record.job.sampling
        num_new = min(TOKENS_PER_SLICE, sampling.max_tokens - len(job.ids))
        job.ids.extend(((sampling.seed or 0) + len(job.ids) + i) % 2**32 for i in range(num_new))
        if len(job.ids) >= 30:
            self._misbehave(job)
        if not job.custom_id.startswith("unlogged"):
            self._log(job)
        return num_new

    def _misbehave(self, job: CountingJob) -> None:
        if job.custom_id.startswith("kills"):
            os.kill(os.getpid(), signal.SIGKILL)
        if job.custom_id.startswith("storeless"):
            raise StoreError("cannot write 'tokens.bin': no answer for 120 s")
        if job.custom_id.startswith("stuck"):
            time.sleep(3600)

    def _log(self, job: CountingJob) -> None:
        token_ids = np.array(job.ids, dtype=np.uint32)
        self._checkpoints.write_tokens(job.assignment.record.job_id, job.assignment.attempt, token_ids)

    def _release(self, job_ids: Iterable[str]) -> None:
        jobs = [self._running.pop(job_id) for job_id in job_ids if job_id in self._running]
        for job in jobs:
            if job.custom_id.startswith("dies"):
                os.kill(os.getpid(), signal.SIGKILL)
            self._log(job)
        self._report.outcomes += [job.outcome("released") for job in jobs]

    def _finish(self, job: CountingJob) -> None:
        record = job.assignment.record
        history = self._checkpoints.history(record.job_id)
        metrics = {
            "num_attempts": job.assignment.num_attempts,
            "num_recovered_tokens": job.num_recovered,
            "num_reported_tokens": job.assignment.num_reported_tokens,
            "workers": [attempt.worker_id for attempt in history],
            "numerics": [attempt.numerics for attempt in history],
        }
        token_ids = np.array(job.ids, dtype=np.uint32)
        line = success_line(
            record,
            "run",
            "text",
            "length",
            model="counting",
            system_fingerprint=self._run.manifest.fingerprint,
            token_ids=token_ids,
            metrics=metrics,
        )
        self._sealing.add(record.job_id, line, clears=True)
        self._report.outcomes.append(self._running.pop(record.job_id).outcome("ended"))


class BrokenSession(CountingSession):
    def __init__(self, config: EngineConfig, run_uri: str, worker_id: str, metrics_host: str | None = None) -> None:
        raise MemoryError("no room for the model")


class RefusingSession(CountingSession):
    """Finds an error that no retry would change."""

    def __init__(self, config: EngineConfig, run_uri: str, worker_id: str, metrics_host: str | None = None) -> None:
        raise ModelError("model counting: it can't count")


class OtherModelSession(CountingSession):
    """Only its first worker finds the run's model."""

    def __init__(self, config: EngineConfig, run_uri: str, worker_id: str, metrics_host: str | None = None) -> None:
        if worker_id != "w1":
            raise OtherModelError("model counting: its weights are not the file that was expected")
        super().__init__(config, run_uri, worker_id, metrics_host)
