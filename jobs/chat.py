"""Messages and template options of chat jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from swiftbatch.jobs.input.validation_errors import FieldError, list_of, shown
from swiftbatch.jobs.json_records import Strict

Scalar = str | int | float | bool | None
Utf8 = Annotated[str, Field(min_length=0)]
"""A text that can be written: a plain `str` of pydantic takes halves of characters, too."""

# message fields that a plain text would lose
TEXTLESS = ("tool_calls", "tool_call_id", "function_call", "audio", "annotations", "refusal")
SHARE_GPT = {"from": "role", "value": "content"}
TEXT_PARTS = ("text", "input_text", "output_text")  # the Responses API, which vLLM takes too, uses the last two names
# variables that the template's renderer or other fields set
NOT_KWARGS = frozenset(
    [
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    ]
)


class Message(Strict):
    """One message of a chat job; `content` is all `parts` joined."""

    role: str = Field(min_length=1)
    content: Utf8
    parts: Annotated[tuple[Utf8, ...], BeforeValidator(list_of("a list of texts"))] = ()
    name: Utf8 | None = None
    reasoning_content: Utf8 | None = None  # "reasoning" is another name of it

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
        values = _with_one_thought({name: value for name, value in values.items() if name not in TEXTLESS})
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


def checked_kwargs(value: object) -> dict[str, Scalar]:
    """Raise FieldError."""
    if not isinstance(value, dict):
        raise FieldError("", f"found {shown(value)}, expected an object")
    for name, each in value.items():
        if name in NOT_KWARGS:
            raise FieldError("", f"found {shown(name)}, expected variables of the chat template alone")
        if not isinstance(each, str | int | float | bool | None) or not _is_writable(name, each):
            expected = "expected strings, numbers, true, false or null"
            raise FieldError("", f"found {shown(each)} as {shown(name)}, {expected}")
    return value


def _is_writable(*values: object) -> bool:
    """Return whether the values fit JSON and UTF-8."""
    try:
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True
