"""A session without a model: it counts upwards, through the real run folder and the real token log.

What a job does is in its `custom_id`: `fails-*` always fails, `kills-*` ends its worker's process at token 30.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Sequence

import numpy as np

from jobs.checkpoints import CheckpointStore
from jobs.results import success_line
from jobs.run import Run
from worker.config import EngineConfig
from worker.work import Assignment, JobProgress, WorkReport

TOKENS_PER_SLICE = 10


class CountingSession:
    """Generates token `seed + position` at each position, ten a slice."""

    metrics_address = None

    def __init__(self, config: EngineConfig, run_uri: str, worker_id: str, metrics_port: int | None = None) -> None:
        self._run = Run.open(run_uri)
        self._checkpoints = CheckpointStore(self._run.store)
        self._running: dict[str, tuple[Assignment, list[int], int]] = {}

    def work(self, assignments: Sequence[Assignment], seconds: float) -> WorkReport:
        failed = []
        for assignment in assignments:
            record = assignment.record
            if record.job.custom_id.startswith("fails"):
                failed.append((record.job_id, "it always fails"))
                continue
            recovered = [int(token) for token in self._checkpoints.read_tokens(record.job_id)]
            self._running[record.job_id] = (assignment, recovered, len(recovered))
        time.sleep(0.05)
        num_generated = sum(self._advance(*job) for job in self._running.values())
        done = [job_id for job_id, (a, ids, _) in self._running.items() if len(ids) == a.record.job.sampling.max_tokens]
        finished = tuple(JobProgress(job_id, self._finish(*self._running.pop(job_id))) for job_id in done)
        progress = tuple(JobProgress(job_id, len(ids)) for job_id, (_, ids, _) in self._running.items())
        return WorkReport(progress, finished, tuple(failed), num_generated)

    def cancel(self, job_ids: Collection[str]) -> None:
        for job_id in job_ids:
            self._running.pop(job_id, None)

    def _advance(self, assignment: Assignment, ids: list[int], _num_recovered: int) -> int:
        record = assignment.record
        sampling = record.job.sampling
        num_new = min(TOKENS_PER_SLICE, sampling.max_tokens - len(ids))
        ids.extend(((sampling.seed or 0) + len(ids) + i) % 2**32 for i in range(num_new))
        if record.job.custom_id.startswith("kills") and len(ids) >= 30:
            os.kill(os.getpid(), signal.SIGKILL)
        self._checkpoints.write_tokens(record.job_id, assignment.attempt, np.array(ids, dtype=np.uint32))
        return num_new

    def _finish(self, assignment: Assignment, ids: list[int], num_recovered: int) -> int:
        metrics = {"num_attempts": assignment.attempt, "num_recovered_tokens": num_recovered}
        token_ids = np.array(ids, dtype=np.uint32)
        line = success_line(
            assignment.record, "run", "text", "length", model="counting", token_ids=token_ids, metrics=metrics
        )
        self._run.write_result(assignment.record.job_id, line)
        self._checkpoints.clear(assignment.record.job_id)
        return len(ids)


class BrokenSession(CountingSession):
    """Can't start."""

    def __init__(self, config: EngineConfig, run_uri: str, worker_id: str, metrics_port: int | None = None) -> None:
        raise MemoryError("no room for the model")
