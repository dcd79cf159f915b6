"""Reads from a run folder what is done and what is still to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.priorities import priorities_of
from swiftbatch.jobs.run.results import error_line
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.shared_prompts import shared_prompts
from swiftbatch.scheduler.driver.job_queue import JobQueue

CANCELLED = "cancelled"  # the error code of a job that its user stopped


def load_queue(run: Run, max_attempts: int) -> JobQueue:
    """The queue of a run's unfinished jobs.

    A started job counts the tokens of its token log, or of the last heartbeat where that is ahead: those were generated
    too, and an attempt that has not come as far has made no progress.
    """
    queue = JobQueue(max_attempts)
    last_beat = run.progress()
    reported = {} if last_beat is None else last_beat.running
    with_checkpoint = set(run.store.list("checkpoints"))
    checkpoints = CheckpointStore.of(run)
    priorities = priorities_of(run.store)
    waiting: list[tuple[JobRecord, int]] = []
    for record, line in run.output_lines():
        if line is None:
            num_logged = len(checkpoints.read_tokens(record.job_id)) if record.job_id in with_checkpoint else 0
            waiting.append((record, max(num_logged, reported.get(record.job.name, 0))))
        elif line["error"] is None:
            queue.add_ended("finished", num_completion_tokens(line), record.job.sampling.max_tokens)
        else:
            queue.add_ended(_state_of_failure(line), 0)
    prompts = shared_prompts([record.prompt_keys for record, _ in waiting])
    for (record, num_tokens), prompt in zip(waiting, prompts, strict=True):
        queue.add(record, num_tokens, priorities.get(record.job.custom_id, 0), prompt)
    return queue


def num_completion_tokens(line: dict[str, Any]) -> int:
    """Generated tokens of a finished job, from its output line."""
    return int(line["response"]["body"]["usage"]["completion_tokens"])


def count_jobs(run: Run) -> dict[str, int]:
    """Number of jobs by state, while no driver runs them."""
    counts = {"pending": 0, "running": 0, "finished": 0, "failed": 0, CANCELLED: 0}
    job_ids = set(run.job_ids())
    finished, failed = (ended & job_ids for ended in run.ended())
    counts["finished"] = len(finished)
    counts["pending"] = len(job_ids) - len(finished) - len(failed)
    for line in run.errors(failed):
        counts[_state_of_failure(line)] += 1
    return counts


def write_cancelled(run: Run, records: Iterable[JobRecord]) -> None:
    """Write that jobs were cancelled. Their token logs stay: `resume --retry-failed` goes on from there."""
    run.write_errors((record.job_id, error_line(record, CANCELLED, "cancelled by its user")) for record in records)


def _state_of_failure(line: dict[str, Any]) -> str:
    return CANCELLED if line["error"]["code"] == CANCELLED else "failed"
