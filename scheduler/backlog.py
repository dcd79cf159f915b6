"""What a run folder says is done and still to do."""

from __future__ import annotations

from jobs.checkpoints import CheckpointStore
from jobs.job import JobRecord
from jobs.results import error_line
from jobs.run import Run
from scheduler.job_queue import JobQueue

CANCELLED = "cancelled"  # the error code of a job that its user stopped


def load_queue(run: Run, max_attempts: int) -> JobQueue:
    """The queue of a run's unfinished jobs, those with a token log counted from where it ends."""
    queue = JobQueue(max_attempts)
    finished, failed = run.finished(), run.failed()
    with_checkpoint = set(run.store.list("checkpoints"))
    checkpoints = CheckpointStore(run.store)
    for record in run.jobs():
        if record.job_id in finished:
            queue.add_ended("finished", num_completion_tokens(run, record.job_id))
        elif record.job_id in failed:
            queue.add_ended(state_of_failure(run, record.job_id), 0)
        else:
            is_started = record.job_id in with_checkpoint
            queue.add(record, len(checkpoints.read_tokens(record.job_id)) if is_started else 0)
    return queue


def num_completion_tokens(run: Run, job_id: str) -> int:
    """Generated tokens of a finished job; 0 without a result."""
    line = run.result(job_id)
    return 0 if line is None else int(line["response"]["body"]["usage"]["completion_tokens"])


def state_of_failure(run: Run, job_id: str) -> str:
    """`cancelled` or `failed`, of a job with an error."""
    line = run.error(job_id)
    return CANCELLED if line is not None and line["error"]["code"] == CANCELLED else "failed"


def count_jobs(run: Run) -> dict[str, int]:
    """Number of jobs by state, while no driver runs them."""
    finished, failed = run.finished(), run.failed()
    counts = {"pending": 0, "running": 0, "finished": 0, "failed": 0, CANCELLED: 0}
    for record in run.jobs():
        if record.job_id in finished:
            counts["finished"] += 1
        elif record.job_id in failed:
            counts[state_of_failure(run, record.job_id)] += 1
        else:
            counts["pending"] += 1
    return counts


def cancel_job(run: Run, record: JobRecord) -> None:
    """Write that a job was cancelled. Its token log stays: `resume --retry-failed` goes on from there."""
    run.write_error(record.job_id, error_line(record, CANCELLED, "cancelled by its user"))
