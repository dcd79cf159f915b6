from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs
from swiftbatch.jobs.checkpoints.token_log import TokenLog
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.output_line import success_line
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.driver.run_lease import RunLease
from swiftbatch.scheduler.runs.extension import Extension, extend_jobs
from swiftbatch.worker.model.model_files import locate_model
from tests.jobs.run.run_parts import write_result
from tests.worker.session.session_parts import claimed, session, to_the_end


def extend(run: Run, model: Path, max_tokens: int, custom_ids: Collection[str] = ()) -> Extension:
    with RunLease(run) as hold:
        return extend_jobs(hold, max_tokens, custom_ids, locate_model(str(model)), None, lambda: None)


def run_all(run: Run, model: Path, **changes: object) -> None:
    worker = session(run, model, **changes)
    to_the_end(worker, *(claimed(run, record) for record, line in run.output_lines() if line is None))


def finish(run: Run, record: JobRecord, reason: str = "length", num_tokens: int | None = None) -> None:
    """Write a job's result and kept tokens 0, 1, 2, ... as a worker does."""
    ids = np.arange(record.job.sampling.max_tokens if num_tokens is None else num_tokens, dtype=np.uint32)
    text = f"{len(ids)} tokens of {record.job.name}"
    line = success_line(
        record,
        "r",
        text,
        reason,
        model="tiny",
        system_fingerprint=run.manifest.fingerprint,
        token_ids=ids,
        metrics={"num_drafts": 1},
    )
    if reason == "length":
        KeptLogs.of(run).write(record.job_id, TokenLog(ids))
    assert write_result(run, record.job_id, line)
