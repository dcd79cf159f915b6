"""Take jobs on that ended at their `max_tokens`, from the tokens that are kept of them; drop what is kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from swiftbatch.jobs.run.run_records import NUM_READERS, RunState
from swiftbatch.jobs.storage.store import Store
from swiftbatch.metrics.report.attempts import parsed_history
from swiftbatch.scheduler.display.progress_line import counted
from swiftbatch.scheduler.driver.queue_loading import count_jobs
from swiftbatch.scheduler.driver.run_lease import RunLease
from swiftbatch.worker.kv.free_memory import KVRoom
from swiftbatch.worker.kv.kv_capacity import KVRoomError
from swiftbatch.worker.model.compute_path import short_length
from swiftbatch.worker.model.model_files import ModelFiles, read_config


@dataclass(frozen=True)
class Kept:
    """Token logs and states of jobs that have ended: the bytes of each, by job id."""

    logs: dict[str, int]
    states: dict[str, int]

    def __str__(self) -> str:
        return ", ".join(
            f"{counted(len(sizes), what)} ({sum(sizes.values()):,} bytes)"
            for sizes, what in ((self.logs, "token log"), (self.states, "job state"))
            if sizes
        )


def kept_of(run: Run) -> Kept:
    """Find what is kept. A checkpoint of a job that may still go on by itself is no part of it. Raises StoreError."""
    found = set(run.store.list(CHECKPOINTS)) - {WORKERS}
    if found:  # failed and cancelled jobs may be run again, from their checkpoints
        found -= set(run.job_ids()) - run.ended()[0]
    with ThreadPoolExecutor(NUM_READERS) as pool:
        states = dict(zip(sorted(found), pool.map(lambda job_id: _size(run.store, job_id), sorted(found)), strict=True))
    return Kept(KeptLogs.of(run).sizes(), states)


def prune(run: Run, *, logs: bool, state: bool) -> str:
    """Drop kept token logs, states or both; returns a line for the user. Raises RunTakenError, StoreError."""
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
    """The bytes of all checkpoints of a job."""
    folders = [f"{CHECKPOINTS}/{job_id}/{attempt}" for attempt in store.list(f"{CHECKPOINTS}/{job_id}")]
    return sum(size or 0 for folder in folders for size in store.sizes(folder).values())


Line = dict[str, Any]

ENDS_OF_THOUGHTS = ("stop", "repetition")  # where there was no room for the closing marker


class NotExtendedError(ValueError):
    """A job can't be taken on; the text says why."""


@dataclass
class Extension:
    """The jobs that go on, in their longer form, the tokens they have, and those that do not, by name with a reason.

    `already` are the named ones that may have as many tokens as it is.
    """

    records: list[JobRecord] = field(default_factory=list)
    num_tokens: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)
    already: list[str] = field(default_factory=list)


def extend_jobs(
    hold: RunLease, max_tokens: int, custom_ids: Collection[str], files: ModelFiles, room: KVRoom | None
) -> Extension:
    """Have jobs go on to `max_tokens` tokens: those of these `custom_ids`, or for none all that a limit ended.

    Each becomes a job of its own, which takes the place of the shorter one. Its checkpoint is written first, then all
    are added at once: killed before that, nothing has changed, and afterwards they go on as any job. Raises StoreError,
    RunTakenError.
    """
    run, found = hold.epoch.run, Extension()
    kept, bound = KeptLogs.of(run), short_length(read_config(files.name, files.path))
    with_tokens = kept.sizes().keys()  # of jobs that might have gone on
    for record, line in run.output_lines():
        if custom_ids and record.job.custom_id not in custom_ids:
            continue
        try:
            if not _is_due(record, line, max_tokens, bool(custom_ids), record.job_id in with_tokens):
                if custom_ids and record.job.sampling.max_tokens >= max_tokens:
                    found.already.append(record.job.name)
                continue
            assert line is not None  # `_is_due` has looked
            log = _kept_log(kept, record, line)
            logprobs = _kept_logprobs(kept, record, log)
            longer = _longer(record, max_tokens, files, bound)
            if room is not None:
                room.refuse_too_long(longer.max_length)
        except (NotExtendedError, KVRoomError) as error:
            found.refused.append((record.job.name, str(error)))
            continue
        identity = Identity(job_id=longer.job_id, fingerprint=run.manifest.fingerprint)
        inherit(run.store, identity, record.job_id, _history(line), log, logprobs)
        found.records.append(longer)
        found.num_tokens += len(log.token_ids)
    hold.epoch.check()
    run.add_jobs(found.records)
    checkpoints = CheckpointStore.of(run)
    for longer in found.records:  # a longer job has all that the superseded one had
        assert longer.supersedes is not None
        kept.delete(longer.supersedes)
        checkpoints.clear(longer.supersedes)
    return found


def _is_due(record: JobRecord, line: Line | None, max_tokens: int, is_named: bool, has_tokens: bool) -> bool:
    """Return whether a job is to go on. Raises NotExtendedError where its user should hear that it does not."""
    own = record.job.sampling.max_tokens
    if line is None:
        if own < max_tokens:
            raise NotExtendedError(f"it has not ended: it runs to its {own} tokens now, then give this command again")
        return False  # extended before: it goes on in any case
    if line["error"] is not None:
        if is_named:
            code = line["error"]["code"]
            raise NotExtendedError(f"it has no result ({code}); `swiftbatch resume --retry-failed` runs it again")
        return False
    if own >= max_tokens:
        if is_named and own > max_tokens:
            raise NotExtendedError(f"--max-tokens: found {max_tokens}, expected more than the {own} that it may have")
        return False
    reason = line["response"]["body"]["choices"][0]["finish_reason"]
    # by whatever it ended: its tokens were kept where a larger limit would have closed its thought
    may_go_on = reason == "length" or (has_tokens and reason in ENDS_OF_THOUGHTS)
    # a line may have choices of both kinds
    if not may_go_on and is_named and record.job.num_choices == 1:
        raise NotExtendedError(
            f"it ended with finish_reason {reason!r}, expected 'length': there is nothing to go on to"
        )
    return may_go_on


def _kept_log(kept: KeptLogs, record: JobRecord, line: Line) -> TokenLog:
    """All tokens of a finished job, which are surely those of its result. Raises NotExtendedError."""
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
    """Read the log-probabilities of all tokens of a job, if it asks for them. Raises NotExtendedError."""
    if record.job.sampling.logprobs is None:
        return None
    try:
        return kept.read_logprobs(record.job_id, log)
    except DamagedFileError as error:
        raise NotExtendedError(f"the log-probabilities of its tokens are not kept: {error}") from None


def _longer(record: JobRecord, max_tokens: int, files: ModelFiles, bound: int | None) -> JobRecord:
    """The same job with more tokens, behind which its model turns texts as it did before: not so beyond a `bound`.

    Raises NotExtendedError where the model's positions end before.
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
    """The attempts that made the result, at least one: they go on as those of the longer job."""
    return parsed_history(line["response"]["body"]["metrics"].get("attempts")) or [AttemptRecord(attempt=1, number=1)]
