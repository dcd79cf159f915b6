"""Cancel a run or a job, whether its driver is alive or not."""

from __future__ import annotations

import time

from jobs.job import JobRecord
from jobs.run import Run, RunError
from scheduler.backlog import cancel_job, count_jobs
from scheduler.heartbeat import current_progress, liveness
from scheduler.takeover import Epoch


def find_job(run: Run, custom_id: str) -> JobRecord:
    """The run's job of that `custom_id`. Raises RunError."""
    for record in run.jobs():
        if record.job.custom_id == custom_id:
            return record
    raise RunError(f"no job {custom_id!r} in the run at {run.store.shown_uri}; its jobs are in jobs.parquet")


def cancel_jobs(run: Run, custom_id: str | None) -> str:
    """Cancel one job, or all unfinished ones; returns a line for the user. Raises RunError."""
    chosen = run.jobs() if custom_id is None else [find_job(run, custom_id)]
    ended = run.finished() | run.failed()
    unfinished = [record for record in chosen if record.job_id not in ended]
    if not unfinished:
        return "nothing to cancel: it has ended already"
    what = f"{len(unfinished)} jobs" if custom_id is None else f"job {custom_id}"
    progress = current_progress(run)
    if progress.state == "running":
        run.request_cancel(None if custom_id is None else unfinished[0].job_id)
        return f"asked the driver to cancel {what}"
    if liveness(run, run.progress()) == "silent":
        Epoch.begin(run)  # should that driver come back, it must not go on with what is cancelled
    for record in unfinished:
        cancel_job(run, record)
    if custom_id is None:
        counts = count_jobs(run)
        run.write_progress(progress.model_copy(update={"state": "cancelled", "jobs": counts, "updated": time.time()}))
    run.write_output()
    return f"cancelled {what}"
