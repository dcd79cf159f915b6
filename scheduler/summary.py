"""A run's progress in a line of text."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs.run import Progress, WorkerStatus


def summary_line(progress: Progress) -> str:
    """One line: jobs by state, tokens, speed, time left."""
    line = f"{progress.state}; jobs: {job_counts(progress.jobs)}; {progress.num_generated_tokens:,} tokens"
    if progress.state != "running":
        return line
    line += f", {progress.tokens_per_second:,.1f} tokens/s"
    return line if progress.eta_seconds is None else f"{line}, at most {duration(progress.eta_seconds)} left"


def worker_line(worker: WorkerStatus, running: dict[str, int]) -> str:
    """One line: where a worker is, and its jobs with the tokens that `running` gives for their `custom_id`s."""
    jobs = ", ".join(_job_with_tokens(custom_id, running.get(custom_id)) for custom_id in worker.jobs) or "no job"
    metrics = f", metrics at {worker.metrics_address}" if worker.metrics_address else ""
    return f"{worker.id} on {worker.host}, process {worker.pid}: {jobs}{metrics}"


def job_counts(jobs: dict[str, int]) -> str:
    """Number of jobs by state, as in `1 running, 3 finished`."""
    return ", ".join(f"{count} {state}" for state, count in jobs.items() if count) or "none"


def duration(seconds: float) -> str:
    """A time span for people, as in 0:01:05."""
    return str(timedelta(seconds=round(seconds)))


def _job_with_tokens(custom_id: str, num_tokens: int | None) -> str:
    return custom_id if num_tokens is None else f"{custom_id} ({num_tokens:,} tokens)"
