"""Makes the jobs of a run from the lines of a job file: counts prompts' tokens, and refuses what can't run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from swiftbatch.jobs.input.line_parsing import JobLine
from swiftbatch.jobs.input.rejects import Reject, Rejects
from swiftbatch.jobs.job import JobRecord, LastMarker, packed
from swiftbatch.jobs.repetition import RepetitionDetection
from swiftbatch.jobs.sampling import SamplingParams, ThinkingEnd
from swiftbatch.jobs.shared_prompts import prompt_keys
from swiftbatch.scheduler.process.signals import unheard
from swiftbatch.worker.caches.cache_room import KVRoom, KVRoomError
from swiftbatch.worker.constraints.grammar_definitions import StructureError
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.model.tokenizer import Chat, EncodedPrompt, TextCodec

LINES_AT_ONCE = 256
LETTERS_AT_ONCE = 2**20

Encoded = EncodedPrompt | ValueError
"""A prompt in tokens, or why there is none."""

RULED = ("thinking_token_budget", "thinking_end", "structured_outputs")  # fields that a model may not be able to follow


@dataclass(frozen=True)
class LineNotes:
    """Findings in lines beside jobs: those that are none, and how many good ones have a field without effect.

    `priorities` are by `custom_id`, but for those that are 0.
    """

    rejects: Rejects = field(default_factory=Rejects)
    priorities: dict[str, int] = field(default_factory=dict)
    without_effect: Counter[str] = field(default_factory=Counter)


def make_records(
    lines: Iterable[tuple[int, JobLine]],
    notes: LineNotes,
    files: ModelFiles,
    codec: TextCodec,
    max_tokens: int | None = None,
    room: KVRoom | None = None,
    loop_guard: RepetitionDetection | None = None,
    thinking_end: ThinkingEnd | None = None,
) -> Iterator[JobRecord]:
    """The jobs of lines, as these come, with the tokens of their prompts counted.

    A line that does not fit the model's positions, or the caches' room, is a reject. So is one that names a token which
    the model does not have. `max_tokens` are those of a line that leaves them open, None for all that the model's
    positions leave; `loop_guard` and `thinking_end` are for a line that says nothing of these.
    """
    longest = 0  # that is known to have room: to look up what is free costs more than all else
    for line_number, line, encoded in _encoded(lines, codec):
        try:
            prompts = _prompts(line, encoded, max_tokens, files)
            _refuse_unfit_sampling(line, min(prompt.limit for prompt in prompts), codec, files.vocab_size)
            length = max(prompt.num_tokens + prompt.limit for prompt in prompts)
            if room is not None and length > longest:
                room.refuse_too_long(length)
                longest = length
        except (ValueError, KVRoomError) as error:
            notes.rejects.add(Reject(line_number, line.custom_id, str(error)))
            continue
        if line.priority:
            notes.priorities[line.custom_id] = line.priority
        if without_effect := _without_effect(line, codec):
            notes.without_effect.update(without_effect)
        for job in line.jobs([prompt.limit for prompt in prompts], loop_guard, thinking_end):
            prompt = prompts[job.choice_index // line.num_choices]
            job_id = job.job_id(files.fingerprint)
            made = (prompt.keys, prompt.token_ids, prompt.last_marker)
            yield JobRecord(job_id, job, line_number, prompt.num_tokens, None, *made)


@dataclass(frozen=True)
class _Prompt:
    """A prompt as tokens."""

    num_tokens: int
    limit: int  # tokens that may come behind it
    keys: bytes
    token_ids: bytes
    last_marker: LastMarker | None


def _encoded(lines: Iterable[tuple[int, JobLine]], codec: TextCodec) -> Iterator[tuple[int, JobLine, list[Encoded]]]:
    """The lines with what `encode_all` makes of their prompts or messages, a bounded number at once."""
    _start_tokenizing_threads()
    rest = iter(lines)
    while some := list(_some(rest)):
        asked = [_asked(line) for _, line in some]
        encoded = iter(codec.encode_all([each for own in asked for each in own]))
        for (line_number, line), own in zip(some, asked, strict=True):
            yield line_number, line, list(islice(encoded, len(own)))


def _start_tokenizing_threads() -> None:
    """Have the library start the threads that it keeps: they are there when Ray starts, and are to hear no signal."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    with unheard():
        Tokenizer(BPE()).encode_batch_fast(["", ""])


def _some(lines: Iterator[tuple[int, JobLine]]) -> Iterator[tuple[int, JobLine]]:
    """The next lines: few where they are long."""
    num_letters = 0
    for line_number, line in islice(lines, LINES_AT_ONCE):
        yield line_number, line
        num_letters += sum(map(len, line.prompts)) + sum(len(message.content) for message in line.messages or ())
        if num_letters >= LETTERS_AT_ONCE:
            return


def _asked(line: JobLine) -> tuple[str | tuple[int, ...] | Chat, ...]:
    return line.prompts if line.messages is None else (Chat(line.messages, line.template),)


def _prompts(line: JobLine, encoded: list[Encoded], max_tokens: int | None, files: ModelFiles) -> list[_Prompt]:
    """Each prompt of a line, or its messages. Raises ValueError."""
    prompts = []
    for number, found in enumerate(encoded, start=1):
        try:
            if isinstance(found, ValueError):
                raise found
            limit = _limit(line, len(found.token_ids), max_tokens, files)
        except ValueError as error:
            which = f" (prompt {number} of {len(encoded)})" if len(encoded) > 1 else ""
            raise ValueError(f"{error}{which}") from None
        ids = found.token_ids
        prompts.append(_Prompt(len(ids), limit, prompt_keys(ids), packed(ids), found.last_marker))
    return prompts


def _limit(line: JobLine, num_prompt_tokens: int, max_tokens: int | None, files: ModelFiles) -> int:
    """The number of tokens that may come behind a prompt. Raises ValueError where the positions end before."""
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


def _refuse_unfit_sampling(line: JobLine, limit: int, codec: TextCodec, vocab_size: int) -> None:
    """Raise ValueError for fields that only the model and the tokens which may come can tell to be wrong."""
    sampling = line.sampling
    if sampling["min_tokens"] > limit:
        raise ValueError(
            f"field 'min_tokens': found {sampling['min_tokens']}, expected at most the {limit} that may come"
        )
    if sampling["bad_words"]:
        codec.bad_word_ids(sampling["bad_words"])
    try:
        if any(sampling.get(name) is not None for name in RULED):
            codec.rules(SamplingParams(**sampling, max_tokens=limit))
    except StructureError as error:
        raise (ValueError(f"field '{line.format_field}': {error.reason}") if line.format_field else error) from None
    biased = [token for token, _ in sampling["logit_bias"]]
    if biased and (textless := sorted({*biased}.intersection(codec.textless_ids))):
        raise ValueError(
            f"field 'logit_bias': token {textless[0]} has no text in this model's tokenizer, so it never comes"
        )
    for field_name, token_ids in (("logit_bias", biased), ("stop_token_ids", sampling["stop_token_ids"])):
        if token_ids and token_ids[-1] >= vocab_size:
            raise ValueError(
                f"field '{field_name}': found token {token_ids[-1]}, the model's are 0 to {vocab_size - 1}"
            )


def _without_effect(line: JobLine, codec: TextCodec) -> set[str]:
    """The names of the fields that the line has and that change nothing."""
    found = {*line.without_effect, *codec.without_effect(line.prompts, line.sampling["stop"])}
    if line.sampling["stop_in_reasoning"] and (codec.markers is None or not line.sampling["stop"]):
        found.add("stop_in_reasoning")
    return found if line.messages is None else found.union(codec.chat.unread(line.messages, line.template))
