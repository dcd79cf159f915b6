"""From the lines of a job file to the jobs of a run: prompts are counted, what can't run is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs.input.job_line import JobLine
from jobs.input.reader import Reject
from jobs.job import JobRecord
from jobs.repetition import RepetitionDetection
from worker.caches.room import KVRoom, KVRoomError
from worker.model.files import ModelFiles
from worker.model.text import TextCodec


@dataclass(frozen=True)
class MadeRecords:
    """The jobs of some lines, the lines that are none, and the fields without effect: how many good lines have each."""

    records: list[JobRecord] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    without_effect: Counter[str] = field(default_factory=Counter)


def make_records(
    lines: Sequence[tuple[int, JobLine]],
    files: ModelFiles,
    max_tokens: int | None = None,
    room: KVRoom | None = None,
    loop_guard: RepetitionDetection | None = None,
) -> MadeRecords:
    """Count each prompt's tokens; a line that does not fit the model's positions, or the caches' room, is a reject.

    So is one that names a token which the model does not have. `max_tokens` are those of a line that leaves them open,
    None for all that the model's positions leave; `loop_guard` is for a line that says nothing of loops.
    """
    codec, made = TextCodec(files), MadeRecords()
    for line_number, line in lines:
        try:
            sizes = _sizes(line, codec, max_tokens, files)
            _refuse_unfit_sampling(line.sampling, min(limit for _, limit in sizes), codec, files.vocab_size)
            if room is not None:
                room.refuse_too_long(max(map(sum, sizes)))
        except (ValueError, KVRoomError) as error:
            made.rejects.append(Reject(line_number, line.custom_id, str(error)))
            continue
        for job in line.jobs([limit for _, limit in sizes], loop_guard):
            num_prompt_tokens, _ = sizes[job.choice_index // line.num_choices]
            made.records.append(JobRecord(job.job_id(files.fingerprint), job, line_number, num_prompt_tokens))
        made.without_effect.update(_without_effect(line, codec))
    return made


def _sizes(line: JobLine, codec: TextCodec, max_tokens: int | None, files: ModelFiles) -> list[tuple[int, int]]:
    """The tokens of each prompt, or of the messages, and how many may come behind. Raises ValueError."""
    if line.messages is not None:
        num_tokens = len(codec.encode_chat(line.messages, line.template))
        return [(num_tokens, _limit(line, num_tokens, max_tokens, files))]
    sizes = []
    for number, prompt in enumerate(line.prompts, start=1):
        try:
            num_tokens = len(codec.encode_prompt(prompt))
            sizes.append((num_tokens, _limit(line, num_tokens, max_tokens, files)))
        except ValueError as error:
            which = f" (prompt {number} of {len(line.prompts)})" if len(line.prompts) > 1 else ""
            raise ValueError(f"{error}{which}") from None
    return sizes


def _limit(line: JobLine, num_prompt_tokens: int, max_tokens: int | None, files: ModelFiles) -> int:
    """How many tokens may come behind a prompt. Raises ValueError where the positions end before."""
    num_left = files.max_positions - num_prompt_tokens
    if line.max_tokens is None:
        if num_left < 1:
            raise ValueError(
                f"prompt: its {num_prompt_tokens} tokens leave none to generate, expected fewer than the model's "
                f"{files.max_positions} positions"
            )
        return num_left if max_tokens is None else min(max_tokens, num_left)
    if line.max_tokens > num_left:
        num_positions = num_prompt_tokens + line.max_tokens
        raise ValueError(
            f"max_tokens: prompt ({num_prompt_tokens} tokens) and max_tokens ({line.max_tokens}) need {num_positions} "
            f"positions, expected at most the model's {files.max_positions}"
        )
    return line.max_tokens


def _refuse_unfit_sampling(sampling: Mapping[str, Any], limit: int, codec: TextCodec, vocab_size: int) -> None:
    """Raise ValueError for fields that only the model and the tokens which may come can tell to be wrong."""
    if sampling["min_tokens"] > limit:
        raise ValueError(
            f"field 'min_tokens': found {sampling['min_tokens']}, expected at most the {limit} that may come"
        )
    codec.bad_word_ids(sampling["bad_words"])
    named = {"logit_bias": [token for token, _ in sampling["logit_bias"]], "stop_token_ids": sampling["stop_token_ids"]}
    for field_name, token_ids in named.items():
        if token_ids and token_ids[-1] >= vocab_size:
            raise ValueError(
                f"field '{field_name}': found token {token_ids[-1]}, the model's are 0 to {vocab_size - 1}"
            )


def _without_effect(line: JobLine, codec: TextCodec) -> set[str]:
    """The names of the fields that the line has and that change nothing."""
    unread = [] if line.messages is None else codec.chat.unread(line.messages, line.template)
    return {*line.without_effect, *unread}
