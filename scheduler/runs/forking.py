"""Forks a job: other jobs begin with its first tokens and go on with seeds of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs
from swiftbatch.jobs.checkpoints.token_log import PackedLogs
from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.job import MAX_CUSTOM_ID, JobRecord, unpacked
from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.sampling_params import derive_seed
from swiftbatch.jobs.shared_prompts import prompt_keys
from swiftbatch.scheduler.runs.run_watch import find_choice, newest_log
from swiftbatch.scheduler.runs.verification import known_tokens
from swiftbatch.worker.model.model_files import ModelFiles, eos_token_ids_of
from swiftbatch.worker.text.tokenizer import TextCodec


class ForkError(UserError):
    """A job that cannot be forked so. The message is one line for the user."""


def forks(
    run: Run, custom_id: str, choice: int, num_kept: int, num_seeds: int, text: str, name: str, files: ModelFiles
) -> list[JobRecord]:
    """Return the jobs `name#1`, `name#2`, ...: each begins with the first `num_kept` tokens and a given `text`.

    Raises ForkError, and RunError for an unknown job.
    """
    entry = find_choice(run, custom_id, choice)
    [parent] = run.records_at(np.asarray([entry.place]))
    codec = TextCodec(files, run.manifest.thinking_markers)
    kept = _tokens(run, parent, entry, codec, files)
    if num_kept > len(kept):
        raise ForkError(f"job {custom_id!r} has {len(kept)} tokens, found --at {num_kept}: expected at most as many")
    begun = (*kept[:num_kept], *(codec.encode(text, add_special_tokens=False) if text else ()))
    sampling = parent.job.sampling
    if sampling.repetition_detection is not None and sampling.repetition_detection.action == "rewind":
        raise ForkError(f"job {custom_id!r} rewinds loops, which could take back tokens that a fork is given")
    if (stop := next((each for each in sampling.stop if each in text), None)) is not None:
        raise ForkError(f"--replace: found {stop!a} in it, a stop text of job {custom_id!r}, which would end its forks")
    if len(begun) >= sampling.max_tokens:
        raise ForkError(
            f"job {custom_id!r}: {len(begun)} given tokens leave none to draw, expected fewer than its max_tokens, "
            f"{sampling.max_tokens}; `swiftbatch extend` makes it longer"
        )
    made = [_fork(parent, f"{name}#{number}", number, begun, files.fingerprint) for number in range(1, num_seeds + 1)]
    _refuse_other_jobs(run, made)
    return made


def _refuse_other_jobs(run: Run, made: Sequence[JobRecord]) -> None:
    index, own = run.job_index(), {record.custom_id: record.job_id for record in made}
    for entry in index.some(index.rows_of("custom_id", own)).entries():
        if entry.job_id != own[entry.custom_id]:
            raise ForkError(f"the run has another job {entry.custom_id!r}: expected another --name")


def _fork(parent: JobRecord, custom_id: str, number: int, begun: Sequence[int], fingerprint: str) -> JobRecord:
    own = {
        "seed": derive_seed(parent.job.sampling.seed or 0, f"fork {number}"),
        "logprobs": None,
        "prompt_logprobs": None,
    }
    changes = {"custom_id": custom_id, "choice_index": 0, "num_choices": 1, "begun_ids": tuple(begun) or None}
    job = parent.job.model_copy(update={**changes, "sampling": parent.job.sampling.model_copy(update=own)})
    if not custom_id.isprintable() or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        raise ForkError(
            f"--name: found {custom_id!a:.60}, expected a name of printable characters, with its number at most "
            f"{MAX_CUSTOM_ID}"
        )
    keys = prompt_keys([*unpacked(parent.prompt_token_ids), *begun])
    return replace(parent, job_id=job.job_id(fingerprint), job=job, supersedes=None, prompt_keys=keys)


def _tokens(run: Run, parent: JobRecord, entry: JobEntry, codec: TextCodec, files: ModelFiles) -> list[int]:
    """Return a job's tokens so far. Raises ForkError if they are not kept."""
    line = run.result(parent.job_id)
    if line is None:
        return [int(each) for each in newest_log(run, CheckpointStore.of(run), PackedLogs.of(run), entry).token_ids]
    [choice] = line["response"]["body"]["choices"]
    found = known_tokens(KeptLogs.of(run), codec, eos_token_ids_of(files), parent, choice)
    if found is None:
        raise ForkError(
            f"job {parent.custom_id!r} has ended, and its tokens are not kept: expected a job that has not ended, or "
            "one that ended at its max_tokens, before `swiftbatch prune`"
        )
    return [int(each) for each in found]
