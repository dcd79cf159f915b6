"""Extends jobs from their kept tokens, and deletes kept logs and states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swiftbatch.jobs.checkpoints.checkpoint_files import AttemptRecord
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs, inherit
from swiftbatch.jobs.checkpoints.token_log import CHECKPOINTS, WORKERS, TokenLog
from swiftbatch.jobs.file_owner import DamagedFileError, Identity
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.logprobs import TokenLogprobs
from swiftbatch.jobs.run.output_line import tokens_sha256
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunState, in_parallel
from swiftbatch.jobs.sampling_params import ALONE
from swiftbatch.jobs.storage.store import Store
from swiftbatch.metrics.report.attempts import parsed_history
from swiftbatch.scheduler.display.progress_line import counted
from swiftbatch.scheduler.driver.queue_loading import count_jobs
from swiftbatch.scheduler.driver.run_lease import RunLease
from swiftbatch.worker.kv.kv_capacity import KVRoom, KVRoomError
from swiftbatch.worker.model.compute_path import short_length
from swiftbatch.worker.model.model_files import ModelFiles, read_config


@dataclass(frozen=True)
class Kept:
    """The bytes of kept logs and states of ended jobs."""

    logs: dict[str, int]
    states: dict[str, int]

    def __str__(self) -> str:
        return ", ".join(
            f"{counted(len(sizes), what)} ({sum(sizes.values()):,} bytes)"
            for sizes, what in ((self.logs, "token log"), (self.states, "job state"))
            if sizes
        )


def kept_of(run: Run) -> Kept:
    """Find the kept logs and states of ended jobs. Raises StoreError."""
    found = set(run.store.list(CHECKPOINTS)) - {WORKERS}
    if found:  # failed and cancelled jobs may resume from their checkpoints
        found -= set(run.job_ids()) - run.ended()[0]
    sizes = in_parallel(lambda job_id: _size(run.store, job_id), sorted(found))
    return Kept(KeptLogs.of(run).sizes(), dict(zip(sorted(found), sizes, strict=True)))


def prune(run: Run, *, logs: bool, state: bool) -> str:
    """Delete kept logs or states; return a line for the user. Raises RunTakenError, StoreError."""
    before = run.progress()
    with RunLease(run) as hold:
        kept = kept_of(run)
        dropped = Kept(kept.logs if logs else {}, kept.states if state else {})
        if logs:
            KeptLogs.of(run).clear()
        for job_id in dropped.states:
            run.store.delete_folder(f"{CHECKPOINTS}/{job_id}")
        ended: RunState = before.state if before and before.state in ("finished", "cancelled") else "finished"
        hold.end("interrupted" if count_jobs(run)["pending"] else ended)
    num_bytes = sum(dropped.logs.values()) + sum(dropped.states.values())
    return f"freed {num_bytes:,} bytes: {dropped}" if num_bytes else "nothing to drop: 0 bytes freed"


def _size(store: Store, job_id: str) -> int:
    folders = [f"{CHECKPOINTS}/{job_id}/{attempt}" for attempt in store.list(f"{CHECKPOINTS}/{job_id}")]
    return sum(size or 0 for folder in folders for size in store.sizes(folder).values())


Line = dict[str, Any]

ENDS_OF_THOUGHTS = ("stop", "repetition")  # a thought may end so when its closing marker had no room


class NotExtendedError(ValueError):
    """A job that can't be extended; the text says why."""


@dataclass
class Extension:
    """The extended jobs, their tokens, and the (name, reason) of each refused job.

    `already` are jobs that the user named although their limit is large enough.
    """

    records: list[JobRecord] = field(default_factory=list)
    num_tokens: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)
    already: list[str] = field(default_factory=list)


def extend_jobs(
    hold: RunLease,
    max_tokens: int,
    custom_ids: Collection[str],
    files: ModelFiles,
    room: KVRoom | None,
    refuse_launch: Callable[[], None],
) -> Extension:
    """Extend jobs to `max_tokens`: the named jobs, or all jobs that ended at a limit.

    Checkpoints are written first, then all jobs at once, so that a kill leaves either state. Raises StoreError,
    RunTakenError, and the errors of `refuse_launch`, which is asked before the first job is extended.
    """
    run, found = hold.epoch.run, Extension()
    kept, bound = KeptLogs.of(run), short_length(read_config(files.name, files.path))
    with_tokens = kept.sizes().keys()  # jobs that could have continued
    for record, line in run.output_lines():
        if custom_ids and record.job.custom_id not in custom_ids:
            continue
        try:
            if not _is_due(record, line, max_tokens, bool(custom_ids), record.job_id in with_tokens):
                if custom_ids and record.job.sampling.max_tokens >= max_tokens:
                    found.already.append(record.job.name)
                continue
            assert line is not None  # `_is_due` has checked it
            log = _kept_log(kept, record, line)
            logprobs = _kept_logprobs(kept, record, log)
            longer = _longer(record, max_tokens, files, bound)
            if room is not None:
                room.refuse_too_long(longer.max_length)
        except (NotExtendedError, KVRoomError) as error:
            found.refused.append((record.job.name, str(error)))
            continue
        if not found.records:
            refuse_launch()
        identity = Identity(job_id=longer.job_id, fingerprint=run.manifest.fingerprint)
        inherit(run.store, identity, record.job_id, _history(line), log, logprobs)
        found.records.append(longer)
        found.num_tokens += len(log.token_ids)
    hold.epoch.check()
    run.add_jobs(found.records)
    checkpoints = CheckpointStore.of(run)
    for longer in found.records:  # a longer job has everything of the superseded one
        assert longer.supersedes is not None
        kept.delete(longer.supersedes)
        checkpoints.clear(longer.supersedes)
    return found


def _is_due(record: JobRecord, line: Line | None, max_tokens: int, is_named: bool, has_tokens: bool) -> bool:
    """Return whether to extend a job. Raises NotExtendedError for a reason to show."""
    own = record.job.sampling.max_tokens
    if line is None:
        if own < max_tokens:
            raise NotExtendedError(f"it has not ended: it runs to its {own} tokens now, then give this command again")
        return False  # extended before: it continues anyway
    if line["error"] is not None:
        if is_named:
            code = line["error"]["code"]
            raise NotExtendedError(f"it has no result ({code}); `swiftbatch resume --retry-failed` runs it again")
        return False
    if record.job.sampling.echo == ALONE:
        if is_named:
            raise NotExtendedError("it asked for its prompt alone: there is nothing to go on to")
        return False
    if own >= max_tokens:
        if is_named and own > max_tokens:
            raise NotExtendedError(f"--max-tokens: found {max_tokens}, expected more than the {own} that it may have")
        return False
    reason = line["response"]["body"]["choices"][0]["finish_reason"]
    # tokens are also kept if a larger limit would have closed the thought
    may_go_on = reason == "length" or (has_tokens and reason in ENDS_OF_THOUGHTS)
    # a line may have choices of both kinds
    if not may_go_on and is_named and record.job.num_choices == 1:
        raise NotExtendedError(
            f"it ended with finish_reason {reason!r}, expected 'length': there is nothing to go on to"
        )
    return may_go_on


def _kept_log(kept: KeptLogs, record: JobRecord, line: Line) -> TokenLog:
    """Return a job's kept log, after a comparison of its tokens with the result.

    Raises NotExtendedError.
    """
    try:
        log = kept.read(record.job_id)
    except DamagedFileError as error:
        raise NotExtendedError(
            f"its tokens are not kept: {error}; a run keeps them unless `swiftbatch prune` has dropped them"
        ) from None
    if tokens_sha256(log.token_ids) != line["response"]["body"]["choices"][0].get("token_ids_sha256"):
        raise NotExtendedError("the kept token log is not that of its result")
    return log


def _kept_logprobs(kept: KeptLogs, record: JobRecord, log: TokenLog) -> TokenLogprobs | None:
    """Return a job's kept log-probabilities, or None if it did not ask for any. Raises NotExtendedError."""
    if record.job.sampling.logprobs is None:
        return None
    try:
        return kept.read_logprobs(record.job_id, log)
    except DamagedFileError as error:
        raise NotExtendedError(f"the log-probabilities of its tokens are not kept: {error}") from None


def _longer(record: JobRecord, max_tokens: int, files: ModelFiles, bound: int | None) -> JobRecord:
    """Return the job with a larger limit.

    Raises NotExtendedError if the limit exceeds the model's positions, or `bound`, above which longrope changes all
    rotations.
    """
    num_positions = record.num_prompt_tokens + max_tokens
    if num_positions > files.max_positions:
        raise NotExtendedError(
            f"prompt ({record.num_prompt_tokens} tokens) and --max-tokens ({max_tokens}) need {num_positions} "
            f"positions, expected at most the model's {files.max_positions}"
        )
    if bound is not None and record.max_length <= bound < num_positions:
        raise NotExtendedError(
            f"prompt ({record.num_prompt_tokens} tokens) and --max-tokens ({max_tokens}) need {num_positions} "
            f"positions: above {bound} the model turns all of a text otherwise (longrope), and the tokens that the job "
            f"has would be others; expected at most {bound}, or a new job"
        )
    sampling = record.job.sampling.model_copy(update={"max_tokens": max_tokens})
    job = record.job.model_copy(update={"sampling": sampling})
    return replace(record, job_id=job.job_id(files.fingerprint), job=job, supersedes=record.job_id)


def _history(line: Line) -> Sequence[AttemptRecord]:
    """Return the attempts behind a result, at least one."""
    return parsed_history(line["response"]["body"]["metrics"].get("attempts")) or [AttemptRecord(attempt=1, number=1)]
