"""Reads a run's done and unfinished jobs from its folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs
from swiftbatch.jobs.checkpoints.token_log import CHECKPOINTS, WORKER_LOGS_FOLDER, WORKERS, PackedLogs
from swiftbatch.jobs.run.job_index import JobEntry, JobIndex
from swiftbatch.jobs.run.output_line import error_line
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import in_parallel
from swiftbatch.jobs.shared_prompts import SharedPrompt, shared_prompts
from swiftbatch.scheduler.driver.attempt_numbers import Attempts
from swiftbatch.scheduler.driver.expected_lengths import LengthStatistics
from swiftbatch.scheduler.driver.job_queue import JobQueue
from swiftbatch.scheduler.driver.waiting_jobs import NO_GROUP, UntouchedJobs

CANCELLED = "cancelled"  # error code of a job that its user stopped
SECONDS_OF_A_WRITE = 60  # at most


def load_queue(run: Run, max_attempts: int, attempts: Attempts | None = None) -> JobQueue:
    """Load the queue of unfinished jobs.

    A started job counts the tokens of its log or of the last heartbeat, whichever are more; fewer are no progress.
    """
    attempts = attempts or Attempts(run.store, 0, {})
    index = run.job_index()
    lengths = LengthStatistics()
    is_waiting, ended = _ended(run, index, lengths, attempts)
    index = index.some(np.flatnonzero(is_waiting))
    priorities, (groups, shared) = _priorities(run, index), _prompts(index)
    started = _started(run, index, attempts)
    rows = np.setdiff1d(np.arange(len(index)), [row for row, _ in started])
    untouched = UntouchedJobs(index.some(rows).without("prompt_keys"), priorities[rows], groups[rows], shared[rows])
    queue = JobQueue(max_attempts, untouched, lengths)
    for row, num_tokens in started:
        prompt = SharedPrompt(None if groups[row] == NO_GROUP else int(groups[row]), int(shared[row]))
        entry = index.entry(row)
        queue.add(entry, num_tokens, int(priorities[row]), prompt, attempts.strikes(entry.job_id))
    for state, (num_jobs, num_tokens) in ended.items():
        queue.add_ended(state, num_tokens, num_jobs)
    return queue


def put_logs_in_place(run: Run, have_all_gone: bool = False) -> None:
    """Move packed logs into the jobs' own files, and delete leftovers.

    Call it before `load_queue`, and after the last worker has gone. Raises StoreError.
    """
    run.store.delete_leftovers(WORKER_LOGS_FOLDER, min_age_seconds=0 if have_all_gone else SECONDS_OF_A_WRITE)
    logs = PackedLogs.of(run)
    found = logs.found()
    logs.put_in_place(found.without(with_results(run, {entry.job_id for entry in found.entries})))
    _clear_finished(run)


def _clear_finished(run: Run) -> None:
    """Delete the checkpoints of finished jobs, except those that `--keep-state` keeps."""
    found = set(run.store.list(CHECKPOINTS)) - {WORKERS}
    if found and (finished := with_results(run, found - KeptLogs.of(run).sizes().keys())):
        in_parallel(CheckpointStore.of(run).clear, finished)


def with_results(run: Run, job_ids: Collection[str]) -> set[str]:
    asked = list(job_ids)
    lines = run.result_lines(asked) if asked else ()
    return {job_id for job_id, line in zip(asked, lines, strict=True) if line is not None}


def _ended(
    run: Run, index: JobIndex, lengths: LengthStatistics, attempts: Attempts
) -> tuple[NDArray[np.bool_], dict[str, tuple[int, int]]]:
    """Return which jobs have not ended, and the numbers (jobs, tokens) of ended jobs by state."""
    finished, error_codes = run.ended_jobs(index)
    rows, tokens = np.asarray(finished, np.int64).reshape(-1, 2).T
    lengths.note_all(index.columns["num_prompt_tokens"][rows], tokens, index.columns["max_tokens"][rows])
    for row in np.intersect1d(rows, index.rows_of("job_id", attempts.counted())):
        attempts.finish(index.columns["job_id"][row].as_py())
    is_waiting = np.ones(len(index), bool)
    is_waiting[rows] = is_waiting[list(error_codes)] = False
    ended = {state: (num, 0) for state, num in Counter(map(_state_of_failure, error_codes.values())).items()}
    return is_waiting, ended | {"finished": (len(rows), int(tokens.sum()))}


def _priorities(run: Run, index: JobIndex) -> NDArray[np.int64]:
    found, priorities = np.zeros(len(index), np.int64), run.priorities()
    for row in index.rows_of("custom_id", priorities):
        found[row] = priorities[index.columns["custom_id"][row].as_py()]
    return found


def _prompts(index: JobIndex) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    from pyarrow import compute

    groups, shared = np.full(len(index), NO_GROUP, np.int32), np.zeros(len(index), np.int32)
    keys = index.columns["prompt_keys"]
    rows = np.flatnonzero(compute.fill_null(compute.binary_length(keys), 0).to_numpy())
    for row, prompt in zip(rows, shared_prompts([keys[row].as_py() for row in rows]), strict=True):
        groups[row], shared[row] = NO_GROUP if prompt.group is None else prompt.group, prompt.num_tokens
    return groups, shared


def _started(run: Run, index: JobIndex, attempts: Attempts) -> list[tuple[int, int]]:
    """Return the rows and token counts of jobs that earlier drivers handed out."""
    last_beat, checkpoints = run.progress(), CheckpointStore.of(run)
    reported = {} if last_beat is None else last_beat.running
    with_checkpoint = set(run.store.list("checkpoints"))
    names = {known for name in reported for known in (name, name.rpartition("[")[0])}  # lines with choices included
    handed_out = with_checkpoint.union(attempts.counted())
    rows = np.union1d(index.rows_of("job_id", handed_out), index.rows_of("custom_id", names))
    entries = [index.entry(row) for row in rows.tolist()]
    found = [entry.job_id for entry in entries if entry.job_id in with_checkpoint]
    read = dict(zip(found, in_parallel(checkpoints.read_attempts, found), strict=True))
    for job_id, (numbers, _) in read.items():
        attempts.note_found(job_id, numbers)
    num_logged = {job_id: len(log.token_ids) for job_id, (_, log) in read.items()}
    return [
        (row, max(num_logged.get(entry.job_id, 0), reported.get(entry.name, 0)))
        for row, entry in zip(rows.tolist(), entries, strict=True)
        if entry.job_id in handed_out or entry.name in reported
    ]


def count_jobs(run: Run) -> dict[str, int]:
    """Count jobs by state while no driver runs."""
    counts = {"pending": 0, "running": 0, "finished": 0, "failed": 0, CANCELLED: 0}
    job_ids = set(run.job_ids())
    finished, failed = (ended & job_ids for ended in run.ended())
    counts["finished"] = len(finished)
    counts["pending"] = len(job_ids) - len(finished) - len(failed)
    for line in run.errors(failed):
        counts[_state_of_failure(line["error"]["code"])] += 1
    return counts


def write_cancelled(run: Run, entries: Iterable[JobEntry]) -> None:
    """Record jobs as cancelled; their logs stay for `resume --retry-failed`."""
    run.write_errors((entry.job_id, error_line(entry, CANCELLED, "cancelled by its user")) for entry in entries)


def _state_of_failure(code: str) -> str:
    return CANCELLED if code == CANCELLED else "failed"
