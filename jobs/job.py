"""A job: one prompt or chat, its sampling, and its id."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from swiftbatch.jobs.json_records import FieldError, Strict, list_of, shown
from swiftbatch.jobs.sampling_params import SamplingParams

Scalar = str | int | float | bool | None
Utf8 = Annotated[str, Field(min_length=0)]
"""A text that can be written: a plain `str` of pydantic takes halves of characters, too."""

# message fields that a plain text would lose
TEXTLESS = ("function_call", "audio", "annotations", "refusal")
SHARE_GPT = {"from": "role", "value": "content"}
TEXT_PARTS = ("text", "input_text", "output_text")  # the Responses API, which vLLM takes too, uses the last two names


class CalledFunction(Strict):
    """A function's name, and its arguments as JSON text of an object."""

    name: Utf8
    arguments: Utf8 = "{}"

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        try:
            read = json.loads(value or "{}") if isinstance(value, str) else value
            if isinstance(read, Mapping):
                return json.dumps(read, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            pass
        raise FieldError("", f"found {shown(value)}, expected a JSON object, or one as text")


class ToolCall(Strict):
    """A call in an assistant's message."""

    id: Utf8 | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """One message of a chat job; `content` is all `parts` joined."""

    role: str = Field(min_length=1)
    content: Utf8
    parts: Annotated[tuple[Utf8, ...], BeforeValidator(list_of("a list of texts"))] = ()
    name: Utf8 | None = None
    reasoning_content: Utf8 | None = None  # "reasoning" is another name of it
    tool_calls: Annotated[tuple[ToolCall, ...], BeforeValidator(list_of("a list of calls"))] = ()
    tool_call_id: Utf8 | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_plain_text(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        if {"from", "value"} <= values.keys() and not values.keys() & {
            "role",
            "content",
        }:  # ShareGPT's files use these names
            values = {SHARE_GPT.get(name, name): value for name, value in values.items()}
        for name in TEXTLESS:
            if values.get(name) not in (None, [], ""):
                raise FieldError(name, f"found {shown(values[name])}, not supported; expected messages of text alone")
        values = _with_calls({name: value for name, value in values.items() if name not in TEXTLESS})
        values = _with_one_thought(values)
        content, parts = values.get("content", ...), values.get("parts")
        if parts and (not isinstance(parts, list | tuple) or content != "\n".join(map(str, parts))):
            raise FieldError("parts", "found it, expected no such field: a content itself may be a list of text parts")
        if content is None and values.get("role") == "assistant":
            return values | {"content": ""}
        if not isinstance(content, list):
            return values
        texts = tuple(_text_of(part, number) for number, part in enumerate(content))
        if not texts:
            raise FieldError("content", "found an empty list, expected a string, or a list of text parts")
        return values | {"content": "\n".join(texts)} | ({"parts": texts} if len(texts) > 1 else {})

    def as_sent(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_defaults=True)


def _with_calls(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out an empty list of calls; an assistant's message with calls needs no content."""
    if values.get("tool_calls") in (None, [], ""):
        return {name: value for name, value in values.items() if name != "tool_calls"}
    return {"content": None, **values} if values.get("role") == "assistant" else values


def _with_one_thought(values: dict[str, Any]) -> dict[str, Any]:
    """Merge the two field names that a thought may have."""
    said = {name: values.pop(name) for name in ("reasoning_content", "reasoning") if name in values}
    thoughts = [value for value in said.values() if value not in (None, [], "")]
    if len(thoughts) > 1 and thoughts[0] != thoughts[1]:
        raise FieldError("reasoning", "found it and another reasoning_content, expected one of them")
    return values | ({"reasoning_content": thoughts[0]} if thoughts else {})


def _text_of(part: object, number: int) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise FieldError(f"content[{number}]", f"found {shown(part)}, expected a text part")
    kind, text = part.get("type", "text"), part.get("text")
    if kind not in TEXT_PARTS:
        raise FieldError(
            f"content[{number}]", f"found a part of type {shown(kind)}, not supported; expected text parts"
        )
    if not isinstance(text, str):
        raise FieldError(f"content[{number}].text", f"found {shown(text)}, expected a string")
    return text


class TemplateOptions(Strict):
    """Options passed to a chat template; `kwargs` are variables that the template defines."""

    kwargs: dict[str, Scalar] = Field(default={})
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Annotated[tuple[dict[str, Any], ...], BeforeValidator(list_of("a list of tools"))] = ()  # as OpenAI's
    must_call: bool = False  # the output is calls of tools, and nothing else
    function: Utf8 | None = None  # the output is one call of this function


MAX_CUSTOM_ID = 512
MAX_SLUG = 40
SORTED = json.JSONEncoder(sort_keys=True)  # `dumps` would make an encoder for each job
LINE_END = b"\n"
LATER_FIELDS = {"prompt_ids", "template", "choice_index", "num_choices", "begun_ids", "lora"}

JobUrl = Literal["/v1/completions", "/v1/chat/completions"]
COMPLETIONS: JobUrl = "/v1/completions"
CHAT: JobUrl = "/v1/chat/completions"


LastMarker = Literal["start", "end"]
"""The marker of thinking that comes last in a prompt: whether it leaves a thought open."""

CustomId = Annotated[str, Field(min_length=1, max_length=MAX_CUSTOM_ID)]
Prompt = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[tuple[TokenId, ...], BeforeValidator(list_of("a list of token ids")), Field(min_length=1)]
Messages = Annotated[tuple[Message, ...], BeforeValidator(list_of("a list of messages")), Field(min_length=1)]


class LoraAdapter(Strict):
    """A LoRA adapter of the run: its name, and the SHA-256 over its files."""

    name: str
    fingerprint: str


class Job(Strict):
    """One generation job with one of `prompt`, `prompt_ids` and `messages`.

    Choices of one line are jobs with the same `custom_id` and different `choice_index`.
    """

    custom_id: CustomId
    url: JobUrl
    prompt: Prompt | None = None
    prompt_ids: TokenIds | None = None
    messages: Messages | None = None
    template: TemplateOptions | None = None
    sampling: SamplingParams
    choice_index: int = Field(default=0, ge=0)
    num_choices: int = Field(default=1, ge=1)
    begun_ids: TokenIds | None = None  # first tokens of the output, given in place of drawn
    lora: LoraAdapter | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        is_chat = self.url == "/v1/chat/completions"
        num_prompts = (self.prompt is not None) + (self.prompt_ids is not None)
        if num_prompts != (not is_chat) or (self.messages is not None) != is_chat or (self.template and not is_chat):
            wanted = "messages" if is_chat else "prompt"
            raise ValueError(f"expected '{wanted}' and nothing else to continue for {self.url}")
        if self.sampling.seed is None:
            raise ValueError("expected a seed: a job draws the same tokens every time")
        if self.choice_index >= self.num_choices:
            raise ValueError(f"found choice {self.choice_index}, expected one of {self.num_choices}, from 0 on")
        return self

    @property
    def name(self) -> str:
        """Return the name in messages, such as `story` or `story[2]`."""
        return self.custom_id if self.num_choices == 1 else f"{self.custom_id}[{self.choice_index}]"

    @property
    def lora_name(self) -> str | None:
        return None if self.lora is None else self.lora.name

    def job_id(self, model_fingerprint: str) -> str:
        """Return a file name of custom_id, model, prompt and sampling: slug, '-', 16 hex digits."""
        messages = None if self.messages is None else [message.as_sent() for message in self.messages]
        identity = [self.custom_id, model_fingerprint, self.prompt, messages, self.sampling.identity()]
        # jobs without these later fields keep their earlier id
        says_later = self.num_choices > 1 or any((self.prompt_ids, self.template, self.begun_ids, self.lora))
        if says_later and (later := self.model_dump(mode="json", include=LATER_FIELDS, exclude_defaults=True)):
            identity.append(later)
        digest = hashlib.sha256(SORTED.encode(identity).encode()).hexdigest()
        slug = _slug(self.custom_id) if self.num_choices == 1 else f"{_slug(self.custom_id)}-{self.choice_index}"
        return f"{slug}-{digest[:16]}"


def _slug(custom_id: str) -> str:
    safe = re.sub(r"[^A-Za-z0-9_]+", "-", custom_id).strip("-")
    return safe[:MAX_SLUG].rstrip("-") or "job"


def packed(token_ids: list[int]) -> bytes:
    """Encode token ids as little-endian uint32."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpacked(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}I", data))


@dataclass(frozen=True)
class JobRecord:
    """A job of a run with its tokenized prompt.

    `line_number` counts from 1 over all files submitted together; the lower one breaks ties. `supersedes` is the
    shorter job it continues. `prompt_token_ids` (`packed`) and `last_marker` are kept because a later rendering may
    differ. `kept` is a JSON object whose fields the job's output line gets in addition; it decides no token.
    """

    job_id: str
    job: Job
    line_number: int
    num_prompt_tokens: int
    supersedes: str | None = None
    prompt_keys: bytes = b""
    prompt_token_ids: bytes = b""
    last_marker: LastMarker | None = None
    kept: str | None = None

    @property
    def custom_id(self) -> str:
        return self.job.custom_id

    @property
    def max_length(self) -> int:
        return self.num_prompt_tokens + self.job.sampling.max_tokens

    @property
    def body(self) -> bytes:
        """Return JSON, `last_marker` and `prompt_token_ids`, joined by line ends."""
        parts = self.job.model_dump_json().encode(), (self.last_marker or "").encode(), self.prompt_token_ids
        return LINE_END.join(parts)

    @classmethod
    def of_body(cls, job_id: str, line_number: int, num_prompt_tokens: int, body: bytes) -> Self:
        """Parse a `body`, which has all that a worker needs."""
        job, marker, token_ids = body.split(LINE_END, 2)
        prompt = {"prompt_token_ids": token_ids, "last_marker": marker.decode() or None}
        return cls(job_id, Job.model_validate_json(job), line_number, num_prompt_tokens, **prompt)  # type: ignore[arg-type]
