"""A run's progress in a line of text."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs.run import Progress


def summary_line(progress: Progress) -> str:
    """One line: jobs by state, tokens, speed, time left."""
    line = f"{progress.state}; jobs: {job_counts(progress.jobs)}; {progress.num_generated_tokens:,} tokens"
    if progress.state != "running":
        return line
    line += f", {progress.tokens_per_second:,.1f} tokens/s"
    return line if progress.eta_seconds is None else f"{line}, at most {duration(progress.eta_seconds)} left"


def job_counts(jobs: dict[str, int]) -> str:
    """Number of jobs by state, as in `1 running, 3 finished`."""
    return ", ".join(f"{count} {state}" for state, count in jobs.items() if count) or "none"


def duration(seconds: float) -> str:
    """A time span for people, as in 0:01:05."""
    return str(timedelta(seconds=round(seconds)))
