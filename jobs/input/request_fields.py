"""The used, ignored and unsupported fields of each form of line."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, field_validator, model_validator

from swiftbatch.jobs.errors import LineError
from swiftbatch.jobs.input.tool_fields import CHOICES, checked_choice, checked_tools, is_writable
from swiftbatch.jobs.job import (
    CHAT,
    COMPLETIONS,
    CustomId,
    JobUrl,
    Messages,
    Scalar,
    TemplateOptions,
    Utf8,
)
from swiftbatch.jobs.json_records import FieldError, Strict, dump_line, is_utf8, shown, whole
from swiftbatch.jobs.sampling_params import MAX_COUNT, MAX_TOP_LOGPROBS, TOP_P, SamplingParams
from swiftbatch.jobs.structured_output import COMPACT, Structure, format_of

MAX_CHOICES = 128  # choices per prompt
MAX_PROMPTS = 2048  # prompts per line, also times choices
MAX_PRIORITY = 2**63 - 1  # the bounds are vLLM's: this and its negative less one

# a server's address with a known path at its end, or a path with or without the version
URL = re.compile(r"(?:https?://\S+?/|/?(?:v1/)?)((?:chat/)?completions)/?(?:\?\S*)?")
OTHER_URL = re.compile(r"(?:\S*/)?(responses|embeddings|moderations|score|rerank|messages)/?(?:\?\S*)?")

LinePrompt = str | tuple[int, ...]
"""A text, or token ids."""


def text_id(value: object) -> object:
    """Write a whole number, such as a row's, as text."""
    number = whole(value)
    return str(number) if type(number) is int else value


def endpoint(value: object) -> object:
    """Return the endpoint of a line's path or address; other values unchanged. Raises FieldError."""
    found = URL.fullmatch(value) if isinstance(value, str) else None
    if found is not None:
        return CHAT if found[1].startswith("chat/") else COMPLETIONS
    if isinstance(value, str) and (other := OTHER_URL.fullmatch(value)):
        problem = f"this is a line of /v1/{other[1]}, expected one of {COMPLETIONS} or {CHAT}"
        raise FieldError("", problem, "invalid_url")
    return value


def prompts_of(value: object) -> tuple[LinePrompt, ...]:
    """Parse a text, a list of token ids, or a list of either. Raises FieldError."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > MAX_PROMPTS:
            raise FieldError("", f"found {len(value)} prompts, expected at most {MAX_PROMPTS}")
        return tuple(_prompt(each, f"[{number}]") for number, each in enumerate(value))
    return (_prompt(value),)


def _prompt(value: object, place: str = "") -> LinePrompt:
    if isinstance(value, str):
        if not value:
            raise FieldError(place, 'found "", expected a string with at least 1 character')
        if not is_utf8(value):
            raise FieldError(place, f"found {shown(value)}, expected text that can be written as UTF-8")
        return value
    if not isinstance(value, list) or not value:
        raise FieldError(place, f"found {shown(value)}, expected a string, or a list of token ids")
    return _token_ids(value, place)


def _token_ids(values: list[Any], place: str) -> tuple[int, ...]:
    token_ids = tuple(map(whole, values))
    for each in token_ids:
        if type(each) is not int or not 0 <= each <= MAX_COUNT:
            raise FieldError(place, f"found {shown(each)} among its token ids, expected whole numbers from 0 on")
    return token_ids


def prompt_ids_of(value: object) -> tuple[int, ...]:
    """Parse the token ids of one prompt. Raises FieldError."""
    if not isinstance(value, list) or not value:
        raise FieldError("", f"found {shown(value)}, expected a list of token ids")
    return _token_ids(value, "")


def logprobs_of(value: object) -> int | bool | None:
    """Check `logprobs`: a number for completions, a boolean for chats. Raises FieldError."""
    value = whole(value)
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int) or not 0 <= value <= MAX_TOP_LOGPROBS:
        raise FieldError("", f"found {shown(value)}, expected {NUM_LOGPROBS}, or in a chat true")
    return value


# variables that the template's renderer or other fields set
NOT_KWARGS = frozenset(
    [
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    ]
)


def checked_kwargs(value: object) -> dict[str, Scalar]:
    """Raise FieldError."""
    if not isinstance(value, dict):
        raise FieldError("", f"found {shown(value)}, expected an object")
    for name, each in value.items():
        if name in NOT_KWARGS:
            raise FieldError("", f"found {shown(name)}, expected variables of the chat template alone")
        if not isinstance(each, str | int | float | bool | None) or not is_writable(name, each):
            expected = "expected strings, numbers, true, false or null"
            raise FieldError("", f"found {shown(each)} as {shown(name)}, {expected}")
    return value


MAX_METADATA, MAX_COLUMNS = 2**16, 2**24  # bytes of JSON


def kept_json(value: Any, most: int) -> str:
    """Return what travels with a job as the JSON text of output lines. Raises FieldError."""
    try:
        text = dump_line(value)[:-1]
    except (ValueError, RecursionError):
        raise FieldError("", f"found {shown(value)}, expected JSON that other programs can read") from None
    if len(text) > most:
        raise FieldError("", f"found {len(text)} bytes of JSON, expected at most {most}")
    return text.decode()


def metadata_of(value: object) -> str | None:
    """Return the JSON text of a line's `metadata`. Raises FieldError."""
    return None if value is None else kept_json(value, MAX_METADATA)


NUM_LOGPROBS = f"a whole number from 0 to {MAX_TOP_LOGPROBS}"
Logprobs = Annotated[int | bool | None, PlainValidator(logprobs_of)]
Prompts = Annotated[tuple[LinePrompt, ...], PlainValidator(prompts_of)]
PromptIds = Annotated[tuple[int, ...], PlainValidator(prompt_ids_of)]
LineId = Annotated[CustomId, BeforeValidator(text_id)]
Endpoint = Annotated[JobUrl, BeforeValidator(endpoint)]
Tools = Annotated[tuple[dict[str, Any], ...], BeforeValidator(checked_tools)]
ToolChoice = Annotated[str, BeforeValidator(checked_choice)]
Metadata = Annotated[str | None, PlainValidator(metadata_of)]
TemplateKwargs = Annotated[dict[str, Scalar], BeforeValidator(checked_kwargs)]


class LineFields(SamplingParams):
    """The fields of every form of line; the run sets the model."""

    max_tokens: int | None = Field(default=None, ge=0, le=MAX_COUNT)  # type: ignore[assignment]  # may be omitted
    top_p: float = Field(default=TOP_P, ge=0.0, le=1.0)  # 0, which OpenAI accepts, keeps the likeliest token
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    model: str = ""  # may name an adapter of the run
    lora: str | None = Field(default=None, min_length=1)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    priority: int = Field(default=0, ge=-MAX_PRIORITY - 1, le=MAX_PRIORITY)  # lower begins earlier, as in vLLM
    logprobs: Logprobs = None  # `asked_logprobs` says what each form takes
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: Structure | None = None
    echo: bool = False
    metadata: Metadata = None  # of any form: it travels to the output as it is

    @model_validator(mode="before")
    @classmethod
    def _compact_format(cls, values: Any) -> Any:
        """Move vLLM's option for white space to the `response_format` that it is for."""
        said, options = values.get("response_format"), values.get("structured_outputs")
        if not isinstance(said, dict) or not isinstance(options, dict) or options.keys() != {COMPACT}:
            return values
        return {**values, "response_format": {**said, **options}, "structured_outputs": None}

    @field_validator("max_completion_tokens", "n", "best_of", "priority", "top_logprobs", mode="before")
    @classmethod
    def _whole_too(cls, value: Any) -> Any:
        return whole(value)

    @field_validator("top_k", mode="before")
    @classmethod
    def _minus_one_is_off(cls, value: object) -> object:
        return 0 if value == -1 else value

    @field_validator("max_tokens", "max_completion_tokens", "thinking_token_budget", mode="before")
    @classmethod
    def _minus_one_is_no_limit(cls, value: object) -> object:
        return None if value == -1 else value

    @field_validator("top_logprobs", "prompt_logprobs", mode="before")
    @classmethod
    def _false_is_none(cls, value: object) -> object:
        return None if value is False else value

    @field_validator("response_format", mode="before")
    @classmethod
    def _format(cls, value: object) -> object:
        return format_of(value)

    @model_validator(mode="after")
    def _one_limit_and_no_choosing(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("fields 'max_tokens' and 'max_completion_tokens': found two limits, expected one")
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("max_tokens", "found 0, expected a value greater than or equal to 1, or echo")
        if self.best_of not in (None, self.n):
            raise FieldError("best_of", f"found {self.best_of}, not supported; expected {self.n}, as many as n")
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("fields 'response_format' and 'structured_outputs': found both, expected at most one")
        if self.response_format is not None:
            self._ends_where_its_structure_does()
        return self

    @property
    def structure(self) -> Structure | None:
        return self.structured_outputs if self.response_format is None else self.response_format

    @property
    def format_field(self) -> str | None:
        if self.response_format is None:
            return None
        return "response_format.json_schema.schema" if self.response_format.kind == "json" else "response_format"


def asked_logprobs(fields: LineFields, is_chat: bool) -> int | None:
    """Return the number of likeliest tokens to report, if any.

    Raises FieldError if a chat uses the form of completions or the reverse.
    """
    said, num_top = fields.logprobs, fields.top_logprobs
    if is_chat and type(said) is int and said > 0:
        raise FieldError("logprobs", f"found {said}, expected true or false, and that number as top_logprobs")
    if is_chat and fields.echo:
        raise FieldError("echo", "found true, which is for completions; expected false, or no such field")
    if is_chat and num_top and not said:
        raise FieldError("top_logprobs", f"found {num_top}, and logprobs is not true; expected both or none")
    if not is_chat and said is True:
        raise FieldError("logprobs", f"found true, expected {NUM_LOGPROBS}: so many of the likeliest tokens")
    if not is_chat and num_top:
        raise FieldError("top_logprobs", f"found {num_top}, which is for chats; expected that number as logprobs")
    if is_chat:
        return num_top or 0 if said else None
    return None if said is False else said


class ChatFields(Strict):
    """A chat's options for its template, and its tools."""

    chat_template_kwargs: TemplateKwargs = Field(default={})
    reasoning_effort: Utf8 | None = None
    add_generation_prompt: bool | None = None  # None: true unless the last message is continued
    continue_final_message: bool = False
    tools: Tools = ()
    tool_choice: ToolChoice = "auto"

    @model_validator(mode="after")
    def _has_what_it_chooses(self) -> Self:
        names = [tool["function"]["name"] for tool in self.tools]
        if self.tool_choice == "required" and not names:
            raise FieldError("tool_choice", 'found "required" without tools, expected tools, or no such field')
        if self.tool_choice not in CHOICES and self.tool_choice[1:-1] not in names:
            found = f"found {shown(self.tool_choice[1:-1])}"
            raise FieldError("tool_choice.function.name", f"{found}, expected the name of one of the tools")
        return self

    @model_validator(mode="after")
    def _does_not_contradict_itself(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "fields 'continue_final_message' and 'add_generation_prompt': found true for both, expected at most one"
            )
        if self.reasoning_effort not in (
            None,
            self.chat_template_kwargs.get("reasoning_effort", self.reasoning_effort),
        ):
            raise FieldError(
                "reasoning_effort",
                f"found {shown(self.reasoning_effort)}, and another in chat_template_kwargs; expected one of them",
            )
        return self

    @property
    def template(self) -> TemplateOptions | None:
        """Return the template options; None if all are defaults."""
        effort: dict[str, Scalar] = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        prompted, tools = self.add_generation_prompt, () if self.tool_choice == "none" else self.tools
        options = TemplateOptions(
            kwargs=self.chat_template_kwargs | effort,
            add_generation_prompt=not self.continue_final_message if prompted is None else prompted,
            continue_final_message=self.continue_final_message,
            tools=tools,
            must_call=self.tool_choice not in ("none", "auto"),
            function=None if self.tool_choice in CHOICES else self.tool_choice[1:-1],
        )
        return None if options == TemplateOptions() else options


def refuse_two_structures(fields: LineFields, template: TemplateOptions | None) -> None:
    """Raise FieldError if calls of tools and a structure exclude each other."""
    if template is None or not template.tools:
        return
    if fields.structure is not None:
        raise FieldError("tools", "found it with a structured output, expected one of them, or the tool_choice none")
    if template.must_call:
        fields._ends_where_its_structure_does()


class PromptFields(Strict):
    """A completion's input, in one of two fields."""

    prompt: Prompts | None = None
    prompt_token_ids: PromptIds | None = None

    @model_validator(mode="after")
    def _has_one_prompt_at_most(self) -> Self:
        if None not in (self.prompt, self.prompt_token_ids):
            raise ValueError("fields 'prompt' and 'prompt_token_ids': found both, expected one of them")
        return self

    @property
    def prompts(self) -> tuple[LinePrompt, ...]:
        return self.prompt or (() if self.prompt_token_ids is None else (self.prompt_token_ids,))


class ShortLine(ChatFields, PromptFields, LineFields):
    """`{"custom_id": ..., "prompt": ..., "max_tokens": ...}`, or `messages` in place of `prompt`."""

    custom_id: LineId
    messages: Messages | None = None

    @model_validator(mode="after")
    def _has_one_text(self) -> Self:
        if bool(self.prompts) == (self.messages is not None):
            found = "both" if self.prompts else "neither"
            name = "prompt" if self.prompt_token_ids is None else "prompt_token_ids"
            problem = f"fields '{name}' and 'messages': found {found}, expected exactly one of them"
            raise LineError(problem, "invalid_value" if self.prompts else "missing_required_parameter")
        if self.messages is None and self.template is not None:
            [name, *_] = self.model_fields_set & ChatFields.model_fields.keys()
            raise FieldError(name, "found it with a prompt, which no chat template is for; expected it with messages")
        asked_logprobs(self, is_chat=self.messages is not None)
        refuse_two_structures(self, self.template)
        return self


class BatchLine(Strict):
    """A line of OpenAI Batch; `url` decides the form of `body`."""

    custom_id: LineId
    method: Literal["POST"] = "POST"
    url: Endpoint
    body: dict[str, Any]

    @field_validator("method", mode="before")
    @classmethod
    def _in_capitals(cls, value: object) -> object:
        return value.upper() if isinstance(value, str) else value


class CompletionBody(PromptFields, LineFields):
    @model_validator(mode="after")
    def _asks_as_completions_do(self) -> Self:
        if not self.prompts:
            raise FieldError("prompt", "found nothing, expected a value", "missing_required_parameter")
        asked_logprobs(self, is_chat=False)
        return self


class ChatBody(ChatFields, LineFields):
    messages: Messages

    @model_validator(mode="after")
    def _asks_as_chats_do(self) -> Self:
        asked_logprobs(self, is_chat=True)
        refuse_two_structures(self, self.template)
        return self


# Fields for other programs: ignored ones and unsupported ones.


# these steer servers, caches, bills and streams, not the text
WITHOUT_EFFECT = frozenset(
    [
        *("user", "store", "service_tier", "stream", "stream_options", "parallel_tool_calls"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "prediction", "request_id"),
        *(
            "session_id",
            "cache_salt",
            "stream_interval",
            "kv_transfer_params",
            "ec_transfer_params",
            "return_mm_kwargs",
        ),
        *("return_tokens_as_token_ids", "return_token_offsets", "routed_experts_prompt_start", "truncation_side"),
        *("guided_decoding_backend", "guided_whitespace_pattern", "prompt_cache_options"),
        *("return_assistant_tokens_mask", "spaces_between_special_tokens"),  # texts have no special tokens
    ]
)
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {  # with the values that ask for nothing, besides null
    "tools": ([],),  # chats take them
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structural_tag": (),
    "logprob_token_ids": ([],),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "watermarking": (False,),
    "skip_special_tokens": (True,),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "include_reasoning": (True,),
    "return_prompt_text": (False,),
    "prompt_embeds": (),
    "documents": ([],),
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "vllm_xargs": ({},),
    "extra_body": ({},),
    "enable_thinking": (),
    "system": ("",),
}
RENAMED = {  # vLLM's older names
    f"guided_{kind}": f"structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")
}
ELSEWHERE = {  # what such a field belongs into
    "extra_body": "its fields beside the others",
    "enable_thinking": "it in chat_template_kwargs",
    "system": "a message of role system",
}
# the value of `add_special_tokens` used here
PLAIN_SPECIAL_TOKENS = {"/v1/completions": True, "/v1/chat/completions": False}


def taken_apart(
    values: dict[str, Any], known: Collection[str], url: str
) -> tuple[dict[str, Any], tuple[str, ...], list[tuple[str, str]]]:
    """Return fields of the form `known`, ignored names, and refusals (field, problem)."""
    left, idle, refused = {}, [], []
    for name, value in values.items():
        if name in known or not is_of_others(name):
            left[name] = value
        elif value is None or (name in WITHOUT_EFFECT and value is False and name != "parallel_tool_calls"):
            continue
        elif name in WITHOUT_EFFECT:
            idle.append(name)
        elif not any(type(whole(value)) is type(each) and value == each for each in _neutral(name, url)):
            refused.append((name, _refusal(name, value, url)))
    return left, tuple(idle), refused


def is_of_others(name: str) -> bool:
    """Return whether other programs use this field."""
    return name in WITHOUT_EFFECT or name in NOT_SUPPORTED or name == "add_special_tokens"


def _neutral(name: str, url: str) -> tuple[Any, ...]:
    return (PLAIN_SPECIAL_TOKENS[url],) if name == "add_special_tokens" else NOT_SUPPORTED[name]


def _refusal(name: str, value: object, url: str) -> str:
    if name in RENAMED:
        return f"found {shown(value)}, an old name that is not supported; expected {RENAMED[name]}"
    if name in ELSEWHERE:
        return f"found {shown(value)}, not supported here; expected {ELSEWHERE[name]}"
    neutral = " or ".join(shown(each) for each in _neutral(name, url)[:1])
    return f"found {shown(value)}, not supported; expected {f'{neutral}, or ' if neutral else ''}no such field"
