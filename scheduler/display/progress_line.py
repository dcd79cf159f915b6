"""A run's progress in a line of text."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING
from unicodedata import category

if TYPE_CHECKING:
    from swiftbatch.jobs.run.run import Run
    from swiftbatch.jobs.run.run_records import Progress, WorkerStatus

SUBMIT_AGAIN = "submit the job file again"


def summary_line(progress: Progress) -> str:
    """Return one line: jobs, tokens, speed, time left, and checkpoints, preemptions and resumes."""
    line = f"{progress.state}; jobs: {job_counts(progress.jobs)}; {progress.num_generated_tokens:,} tokens"
    if progress.num_copied_tokens:
        line += f", {progress.num_read_tokens:,} read and {progress.num_copied_tokens:,} shared"
    if progress.state != "running":
        return line
    line += f", {speed_of(progress)}"
    if progress.eta_seconds is not None:
        line += f", at most {duration(progress.eta_seconds)} left"
    return "; ".join([line, *safety(progress)])


def speed_of(progress: Progress) -> str:
    length = progress.mean_acceptance_length
    per_step = "" if length is None else f", {length:.2f} tokens/step"
    num_tokens = progress.num_tokens_by_draft
    by_chains = f" ({num_tokens['chain'] / sum(num_tokens.values()):.0%} in chains)" if num_tokens.get("chain") else ""
    return f"{progress.tokens_per_second:,.1f} tokens/s{per_step}{by_chains}"


def safety(progress: Progress) -> list[str]:
    """Return the checkpoints' age, preemptions and resumes."""
    age = checkpoint_age(progress)
    num_preemptions, num_resumes = sum(progress.num_preemptions.values()), sum(progress.num_resumes.values())
    parts = [] if age is None else [f"checkpoint {age:.0f} s ago"]
    if num_preemptions or num_resumes:
        parts.append(f"{counted(num_preemptions, 'preemption')}, {counted(num_resumes, 'resume')}")
    return parts


def checkpoint_age(progress: Progress) -> float | None:
    """Return the age of the last checkpoint of the busy worker whose last checkpoint is oldest.

    If workers run on several machines, the age depends on their clocks.
    """
    busy = [worker for worker in progress.workers if worker.jobs]
    times = [worker.last_checkpoint for worker in busy if worker.last_checkpoint is not None]
    return max(0.0, progress.updated - min(times)) if times else None


def worker_line(worker: WorkerStatus, running: dict[str, int]) -> str:
    jobs = ", ".join(_job_with_tokens(custom_id, running.get(custom_id)) for custom_id in worker.jobs) or "no job"
    metrics = f", metrics at {worker.metrics_address}" if worker.metrics_address else ""
    speed = f"; {worker.tokens_per_second:,.1f} tokens/s" if worker.jobs else ""
    return f"{worker.id} on {worker.host}, process {worker.pid}: {jobs}{metrics}{speed}"


def numerics_lines(progress: Progress) -> list[str]:
    """Return one line about numerics if all workers agree, else one per kind."""
    kinds: dict[str, list[str]] = {}
    for worker in progress.workers:
        kinds.setdefault(worker.numerics, []).append(worker.id)
    if len(kinds) == 1:
        return [f"numerics: {printable(numerics)}" for numerics in kinds]
    return [f"numerics of {', '.join(ids)}: {printable(numerics)}" for numerics, ids in kinds.items()]


def job_counts(jobs: dict[str, int]) -> str:
    """Return counts as `1 running, 3 finished`."""
    return ", ".join(f"{count:,} {state}" for state, count in jobs.items() if count) or "none"


def duration(seconds: float) -> str:
    """Return a time span as 0:01:05, never negative."""
    return str(timedelta(seconds=max(0, round(seconds))))


def counted(number: int, noun: str) -> str:
    """Return `1 line` or `2 lines`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def damage_lines(run: Run) -> list[str]:
    """Return a line per unusable file, with its remedy."""
    from swiftbatch.jobs.run.result_files import SUFFIX
    from swiftbatch.jobs.run.run import PROGRESS, REJECTS

    place = run.store.shown_uri
    is_of_jobs = bool(run.damaged.keys() - {PROGRESS, REJECTS})
    names = {job_id: record.job.name for job_id, record in run.all_jobs().items()} if is_of_jobs else {}
    resume = f"swiftbatch resume {place}"
    remedies = {REJECTS: SUBMIT_AGAIN, PROGRESS: f"it is written anew with: {resume}"}

    def remedy(path: str) -> str:
        if path.endswith(SUFFIX):
            return f"its whole results are used, its other jobs run again with: {resume}"
        job_id = path.rpartition("/")[2].removesuffix(".json")
        return f"job {printable(names.get(job_id, job_id))} runs again with: {resume}"

    return [
        f"{printable(path)} in {place} is damaged, {printable(problem)}: {remedies.get(path) or remedy(path)}"
        for path, problem in sorted(run.damaged.items())
    ]


def printable(text: str) -> str:
    """Escape all characters that control a terminal or break a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def harmless(text: str) -> str:
    """Escape control characters except newline and tab."""
    return "".join(c if category(c) != "Cc" or c in "\n\t" else printable(c) for c in text)


def _job_with_tokens(custom_id: str, num_tokens: int | None) -> str:
    name = printable(custom_id)
    return name if num_tokens is None else f"{name} ({num_tokens:,} tokens)"
