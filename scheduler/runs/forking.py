"""Forks a job: other jobs begin with its first tokens and go on with seeds of their own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

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
from swiftbatch.scheduler.runs.verification import closes_thoughts, known_tokens
from swiftbatch.worker.engine.job_sequence import sequence_of
from swiftbatch.worker.engine.stopping import StopRule
from swiftbatch.worker.model.model_files import ModelFiles, eos_token_ids_of
from swiftbatch.worker.sampling.token_masks import ConstraintError
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
    codec = TextCodec(files, run.manifest.thinking_markers, lenient_schemas=run.manifest.lenient_schemas)
    kept = _tokens(run, parent, entry, codec, files) if num_kept else []
    if num_kept > len(kept):
        raise ForkError(f"job {custom_id!r} has {len(kept)} tokens, found --at {num_kept}: expected at most as many")
    begun = (*kept[:num_kept], *(codec.encode(text, add_special_tokens=False) if text else ()))
    sampling = parent.job.sampling
    if sampling.repetition_detection is not None and sampling.repetition_detection.action == "rewind":
        raise ForkError(f"job {custom_id!r} rewinds loops, which could take back tokens that a fork is given")
    if len(begun) >= sampling.max_tokens:
        raise ForkError(
            f"job {custom_id!r}: {len(begun)} given tokens leave none to draw, expected fewer than its max_tokens, "
            f"{sampling.max_tokens}; `swiftbatch extend` makes it longer"
        )
    _refuse_impossible(parent, kept[:num_kept], text, codec, files)
    made = [_fork(parent, f"{name}#{number}", number, begun, files.fingerprint) for number in range(1, num_seeds + 1)]
    _refuse_other_jobs(run, made)
    return made


class Impossible(NamedTuple):
    """The place of a token that cannot be given, from 0, and what it does."""

    place: int
    reason: str


def _refuse_impossible(parent: JobRecord, kept: Sequence[int], text: str, codec: TextCodec, files: ModelFiles) -> None:
    """Refuse kept tokens that break the job's structure or thought, and those that leave nothing to draw."""

    def first_problem(size: int) -> Impossible | None:
        """Return the problem of the kept tokens and the first `size` characters of the text."""
        given = codec.encode(text[:size], add_special_tokens=False) if size else []
        return _impossible(parent, kept, given, codec, files)

    found = first_problem(len(text))
    if found is None:
        return
    job = f"job {parent.custom_id!r}"
    if found.place < len(kept):
        raise ForkError(f"--at {len(kept)}: token {found.place + 1} {found.reason} of {job}; expected fewer tokens")
    sizes = range(1, len(text))
    place = 1 + bisect_left(sizes, True, key=lambda size: first_problem(size) is not None)
    raise ForkError(
        f"--replace: character {place:,}, {text[place - 1]!a}, {found.reason} of {job}; expected another text"
    )


def _impossible(
    parent: JobRecord, kept: Sequence[int], given: Sequence[int], codec: TextCodec, files: ModelFiles
) -> Impossible | None:
    plain = replace(parent, job=parent.job.model_copy(update={"begun_ids": None}))
    sequence, thinking = sequence_of(plain, codec, files.vocab_size)
    sequence.eos_token_ids = eos_token_ids_of(files)
    constraints = [rule.start(sequence) for rule in sequence.rules]
    stop_rule = StopRule(sequence, codec.output_text, thinking)
    for index, token_id in enumerate([*kept, *given]):
        try:
            for constraint in constraints:
                constraint.push(token_id)
        except ConstraintError:
            return Impossible(index, "breaks the structure or thinking budget")
        reason = stop_rule.after(token_id)
        is_drawn = index < len(kept) - 1  # an end there was none, since a thought was closed
        if reason is not None and not is_drawn and not closes_thoughts(parent):
            return Impossible(index, f"ends the output ({reason})")
    return None


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
    if not custom_id.isprintable() or custom_id.startswith("#") or len(custom_id) > MAX_CUSTOM_ID:
        raise ForkError(
            f"--name: found {custom_id!a:.60}, expected a name of printable characters, with its number at most "
            f"{MAX_CUSTOM_ID}"
        )
    keys = prompt_keys([*unpacked(parent.prompt_token_ids), *begun], parent.job.lora)
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
