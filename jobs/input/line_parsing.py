"""Parses input lines into jobs; what earlier lines share is checked once."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from swiftbatch.jobs.errors import LineError
from swiftbatch.jobs.input.request_fields import (
    MAX_PROMPTS,
    BatchLine,
    ChatBody,
    ChatFields,
    CompletionBody,
    LineFields,
    LinePrompt,
    ShortLine,
    asked_logprobs,
    metadata_of,
    taken_apart,
    text_id,
)
from swiftbatch.jobs.job import (
    CHAT,
    COMPLETIONS,
    MAX_CUSTOM_ID,
    Job,
    JobUrl,
    LoraAdapter,
    Message,
    Messages,
    TemplateOptions,
)
from swiftbatch.jobs.json_records import FieldError, code_of, is_utf8, of_checked, reasons, shown
from swiftbatch.jobs.sampling_params import (
    ALONE,
    MAX_COUNT,
    MAX_SEED,
    MIN_SEED,
    TOP_P,
    RepetitionDetection,
    SamplingParams,
    ThinkingEnd,
    derive_seed,
    without_closing,
)
from swiftbatch.jobs.structured_output import idle_formats

Form = TypeVar("Form", bound=BaseModel)

NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class JobLine:
    """One line: `prompts` of a completion or `messages` of a chat."""

    custom_id: str
    prompts: tuple[LinePrompt, ...]
    messages: tuple[Message, ...] | None
    template: TemplateOptions | None
    sampling: Mapping[str, Any]  # all sampling fields except `max_tokens`, with a seed
    num_choices: int
    max_tokens: int | None  # None: the run's limit, or the rest of the context
    priority: int = 0  # lower numbers begin first
    lora: str | None = None  # the name of an adapter
    model: str = ""  # may name an adapter, too
    without_effect: tuple[str, ...] = ()  # ignored fields
    format_field: str | None = None  # None: no structure, or one of `structured_outputs`
    metadata: str | None = None  # JSON that travels to the output
    columns: str | None = None  # the same of kept columns
    # checked parameters by the fields laid over `sampling`; lines with equal fields share them
    checked: dict[tuple[object, ...], SamplingParams] = field(default_factory=dict, compare=False, repr=False)

    @property
    def url(self) -> JobUrl:
        return COMPLETIONS if self.messages is None else CHAT

    @property
    def kept(self) -> str | None:
        """Return the JSON object that output lines get in addition, if any."""
        parts = [f'"{name}": {text}' for name, text in (("metadata", self.metadata), ("columns", self.columns)) if text]
        return f"{{{', '.join(parts)}}}" if parts else None

    def jobs(
        self,
        max_tokens: Sequence[int],
        loop_guard: RepetitionDetection | None = None,
        thinking_end: ThinkingEnd | None = None,
        lora: LoraAdapter | None = None,
    ) -> list[Job]:
        """Return the line's jobs: all choices of the first prompt, then of the next.

        `max_tokens` has one limit per prompt. `thinking_end` skips lines with log-probabilities, because a forced
        marker has none.
        """
        prompts: Sequence[LinePrompt | None] = self.prompts if self.messages is None else [None]
        limited = [each for each in zip(prompts, max_tokens, strict=True) for _ in range(self.num_choices)]
        said: RepetitionDetection | None = self.sampling.get("repetition_detection")
        detection = loop_guard if said is None else said if said.is_on else None
        said_end: ThinkingEnd | None = self.sampling.get("thinking_end") or thinking_end
        if self.sampling.get("logprobs") is not None:
            said_end = self.sampling.get("thinking_end")
            detection = detection if said is not None or detection is None else without_closing(detection)
        kept = {"repetition_detection": detection, "thinking_end": said_end if said_end == "close" else None}
        return [
            self._job(prompt, self._sampling(kept, most, number), number, len(limited), lora)
            for number, (prompt, most) in enumerate(limited)
        ]

    def _sampling(self, kept: dict[str, Any], max_tokens: int, choice_index: int) -> SamplingParams:
        seed = choice_seed(self.sampling["seed"], choice_index)
        known = self.checked.get(tuple(kept.values()))
        if known is not None:
            return known.with_own(max_tokens, seed)
        params = SamplingParams(**{**self.sampling, **kept, "max_tokens": max_tokens, "seed": seed})
        return self.checked.setdefault(tuple(kept.values()), params)

    def _job(
        self,
        prompt: LinePrompt | None,
        sampling: SamplingParams,
        choice_index: int,
        num_choices: int,
        lora: LoraAdapter | None,
    ) -> Job:
        values = {
            "custom_id": self.custom_id,
            "url": self.url,
            "prompt": prompt if isinstance(prompt, str) else None,
            "prompt_ids": prompt if isinstance(prompt, tuple) else None,
            "messages": self.messages,
            "template": self.template,
            "sampling": sampling,
            "choice_index": choice_index,
            "num_choices": num_choices,
            "begun_ids": None,
            "lora": lora,
        }
        return of_checked(Job, values)


def choice_seed(seed: int, choice_index: int) -> int:
    """Return a choice's seed; the first keeps the line's."""
    if choice_index == 0:
        return seed
    digest = hashlib.sha256(f"choice {choice_index} of {seed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def parse_object(text: str) -> dict[str, Any]:
    """Parse one line's JSON object. Raises `LineError`."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise LineError(f"found {shown(value)}, expected a JSON object", "invalid_json_line")
    return value


def parse_json(text: str) -> Any:
    """Parse JSON without duplicate names. Raises `LineError`.

    NaN and Infinity pass, so that the field's error can name it.
    """
    try:
        return _DECODER.decode(text) if text[:1] != BYTE_ORDER_MARK else json.loads(text)
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")  # some of Python's messages end with "at"
        reason = f"not JSON: {problem} at column {error.colno}, expected one object on the line"
        raise LineError(reason, "invalid_json_line") from None
    except RecursionError:
        problem = "nested too deeply, expected one flat object on the line"
        raise LineError(f"not readable: {problem}", "invalid_json_line") from None
    except LineError:
        raise
    except ValueError:  # Python refuses numbers of thousands of digits
        problem = "found a number of thousands of digits, expected ordinary numbers"
        raise LineError(f"not readable: {problem}", "invalid_json_line") from None


def line_from_object(values: dict[str, Any], run_seed: int, defaults: Mapping[str, Any] = NO_DEFAULTS) -> JobLine:
    """Turn a parsed line into a `JobLine`; `defaults` are sampling fields that it may leave out. Raises `LineError`."""
    _refuse_other_format(values)
    if any(values.get(name) is not None for name in ("method", "url", "body")):
        batch = _validated(BatchLine, values)
        if batch.url == COMPLETIONS:
            completion, idle = _request(CompletionBody, batch.body, COMPLETIONS, defaults, "body.")
            return _job_line(batch.custom_id, completion, completion.prompts, None, idle, run_seed)
        chat, idle = _request(ChatBody, batch.body, CHAT, defaults, "body.")
        return _job_line(batch.custom_id, chat, (), chat.messages, idle, run_seed)
    line, idle = _request(ShortLine, values, COMPLETIONS if values.get("messages") is None else CHAT, defaults)
    return _job_line(line.custom_id, line, line.prompts, line.messages, idle, run_seed)


OTHER_FORMATS = {"params": "Anthropic's Message Batches", "request": "Gemini's Batch API"}
OWN_INPUTS = {"prompt", "prompt_token_ids", "messages", "body"}


def _refuse_other_format(values: dict[str, Any]) -> None:
    """Raise `LineError` for a line of another batch API."""
    for name, whose in OTHER_FORMATS.items():
        if isinstance(values.get(name), dict) and not values.keys() & OWN_INPUTS:
            expected = "expected one with url and body, as of OpenAI's Batch API, or with prompt or messages"
            raise LineError(f"field '{name}': this is a line of {whose}, {expected}", "unknown_parameter")


def _request(
    form: type[Form], values: dict[str, Any], url: JobUrl, defaults: Mapping[str, Any], prefix: str = ""
) -> tuple[Form, tuple[str, ...]]:
    """Return the validated fields, and the names of ignored fields.

    Raises `LineError`.
    """
    known, idle, refused = taken_apart(values, form.model_fields, url)
    if refused:
        problems = "; ".join(f"field '{prefix}{name}': {problem}" for name, problem in refused)
        raise LineError(problems, "unsupported_parameter")
    return _validated(form, known, prefix, defaults), idle


def _validated(
    form: type[Form], values: dict[str, Any], prefix: str = "", defaults: Mapping[str, Any] = NO_DEFAULTS
) -> Form:
    """Validate one object; null means the default, as in OpenAI's API. Raises `LineError`."""
    nullable = _nullable(form)
    try:
        said = {k: v for k, v in values.items() if v is not None or k not in nullable}
        return form.model_validate({**defaults, **said})
    except ValidationError as error:
        raise LineError(reasons(error, form, prefix), code_of(error)) from None


@functools.cache
def _nullable(form: type[BaseModel]) -> frozenset[str]:
    """Return the fields for which null means the default."""
    required = {name for name, field in form.model_fields.items() if field.is_required()}
    return frozenset({*ShortLine.model_fields, *BatchLine.model_fields} - required)


SAMPLING_FIELDS = tuple(name for name in SamplingParams.model_fields if name != "max_tokens")


def _job_line(
    custom_id: str,
    fields: LineFields,
    prompts: tuple[LinePrompt, ...],
    messages: tuple[Message, ...] | None,
    without_effect: tuple[str, ...],
    run_seed: int,
) -> JobLine:
    sampling = {name: getattr(fields, name) for name in SAMPLING_FIELDS}
    sampling["logprobs"] = asked_logprobs(fields, is_chat=messages is not None)
    sampling["structured_outputs"] = fields.structure
    if fields.max_tokens == 0:
        sampling["echo"] = ALONE
    if fields.top_p == 0:
        sampling |= {"top_k": 1, "top_p": TOP_P}
    if fields.structure is not None:
        without_effect += tuple(f"format {shown(each)}" for each in idle_formats(fields.structure))
    if fields.seed is None:
        sampling["seed"] = derive_seed(run_seed, custom_id)
    if len(prompts) * fields.n > MAX_PROMPTS:
        raise LineError(
            f"fields 'prompt' and 'n': found {len(prompts)} prompts with {fields.n} choices each, expected at most "
            f"{MAX_PROMPTS} choices in all"
        )
    return JobLine(
        custom_id=custom_id,
        prompts=prompts,
        messages=messages,
        template=fields.template if isinstance(fields, ChatFields) and messages is not None else None,
        sampling=sampling,
        num_choices=fields.n,
        max_tokens=fields.max_completion_tokens if fields.max_tokens is None else max(1, fields.max_tokens),
        priority=fields.priority,
        lora=fields.lora,
        model=fields.model,
        without_effect=without_effect,
        format_field=fields.format_field,
        metadata=fields.metadata,
    )


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                raise LineError(f"field {shown(name)}: found twice, expected once", "invalid_json_line")
            names.add(name)
    return values


BYTE_ORDER_MARK = "\ufeff"  # `loads` refuses it with a misleading message
_DECODER = json.JSONDecoder(object_pairs_hook=_unique_names)  # `loads` would make a decoder for each line


# Reuses checks for lines that differ from an earlier one only in their own fields.


MAX_CACHED_LINES = 1000  # a file may have one kind per line
MAX_KEY_CHARACTERS = 4000  # length of a kind's key
OWN_FIELDS = ("prompt", "prompt_token_ids", "messages", "max_tokens", "seed", "metadata")
FIELDS_BOUND_TO_OWN = ("max_completion_tokens", "min_tokens")  # their validity depends on the line's `max_tokens`
MESSAGES: TypeAdapter[tuple[Message, ...]] = TypeAdapter(Messages, config=ConfigDict(strict=True))


@dataclass(frozen=True)
class ParsedLineCache:
    """The first good line of each kind, keyed by all fields that do not differ from line to line."""

    run_seed: int
    defaults: Mapping[str, Any] = field(default_factory=dict)
    _firsts: dict[str, JobLine] = field(default_factory=dict)

    def line(self, values: dict[str, Any]) -> JobLine:
        """Raise `LineError`."""
        body = values.get("body")
        fields = body if isinstance(body, dict) else values
        try:
            kind = _kind(values, fields)
        except RecursionError:
            return line_from_object(values, self.run_seed, self.defaults)
        first = self._firsts.get(kind)
        if first is not None and (own := self._own(text_id(values.get("custom_id")), fields, first)) is not None:
            return own
        line = line_from_object(values, self.run_seed, self.defaults)
        if (
            len(self._firsts) < MAX_CACHED_LINES
            and len(kind) <= MAX_KEY_CHARACTERS
            and not fields.keys() & set(FIELDS_BOUND_TO_OWN)
            and line.sampling["echo"] != ALONE  # the line's `max_tokens` says so
        ):
            self._firsts.setdefault(kind, line)
        return line

    def _own(self, custom_id: object, fields: dict[str, Any], first: JobLine) -> JobLine | None:
        """Return the line made from `first` and its own fields, or None if it needs a full check."""
        prompt, messages = fields.get("prompt"), fields.get("messages")
        max_tokens, seed = fields.get("max_tokens", 1), fields.get("seed", 0)
        is_named = isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_CUSTOM_ID and custom_id.isascii()
        is_counted = type(max_tokens) is int and 0 < max_tokens <= MAX_COUNT
        if not is_named or not is_counted or type(seed) is not int or not MIN_SEED <= seed <= MAX_SEED:
            return None
        if fields.get("prompt_token_ids") is not None or (prompt is None) == (messages is None):
            return None
        if (messages is None) != (first.messages is None):
            return None
        if messages is None and (not isinstance(prompt, str) or not prompt or not is_utf8(prompt)):
            return None
        checked = None if messages is None else _messages(messages)
        if messages is not None and checked is None:
            return None
        try:
            metadata = metadata_of(fields.get("metadata"))
        except FieldError:
            return None
        name = str(custom_id)
        return JobLine(  # `replace` takes twice as long
            custom_id=name,
            prompts=() if checked is not None else (str(prompt),),
            messages=checked,
            template=first.template,
            sampling={**first.sampling, "seed": seed if "seed" in fields else derive_seed(self.run_seed, name)},
            num_choices=first.num_choices,
            max_tokens=max_tokens if "max_tokens" in fields else first.max_tokens,
            priority=first.priority,
            lora=first.lora,
            model=first.model,
            without_effect=first.without_effect,
            format_field=first.format_field,
            metadata=metadata,
            checked=first.checked,
        )


def _kind(values: dict[str, Any], fields: dict[str, Any]) -> str:
    """Return a key of all fields but a line's own; repr, unlike ==, separates 1, 1.0 and true."""
    around = [] if fields is values else [(name, value) for name, value in values.items() if name not in _AROUND]
    rest = [(name, None) if name in _OWN else (name, value) for name, value in fields.items()]
    return repr((around, rest))


_AROUND, _OWN = frozenset({"custom_id", "body"}), frozenset({"custom_id", *OWN_FIELDS})


def _messages(value: object) -> tuple[Message, ...] | None:
    try:
        return MESSAGES.validate_python(value)
    except ValidationError:
        return None
