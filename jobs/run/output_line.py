"""Output lines in the form of OpenAI Batch: how they are made, and the parts of them that readers need."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from swiftbatch.jobs.file_owner import Identity
from swiftbatch.jobs.job import JobRecord, unpacked
from swiftbatch.jobs.json_records import NOT_TEXT, reasons

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from swiftbatch.jobs.run.job_index import JobEntry


@dataclass(frozen=True)
class Reasoning:
    """A thought without markers, its tokens, and the rest of the output."""

    text: str
    content: str
    num_tokens: int


@dataclass(frozen=True)
class ToolCalls:
    """Calls of tools in OpenAI's form, the rest of the answer, and a thought that has no markers of thinking."""

    tool_calls: list[dict[str, Any]]
    content: str | None
    thought: str | None = None


def success_line(
    record: JobRecord,
    run_id: str,
    text: str,
    finish_reason: str,
    *,
    model: str,
    system_fingerprint: str,
    token_ids: NDArray[np.uint32],
    metrics: Mapping[str, Any],
    logprobs: Mapping[str, Any] | None = None,
    reasoning: Reasoning | None = None,
    calls: ToolCalls | None = None,
    ignored_keywords: tuple[str, ...] = (),
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None,
) -> dict[str, Any]:
    """Return a finished job's output line; `token_ids` are all generated tokens.

    A metric that is not finite becomes null. `reasoning` is None for a model without thoughts. `ignored_keywords` of
    its schema did not bind the text.
    """
    is_chat = record.job.messages is not None
    choice = {
        "index": record.job.choice_index,
        **({"message": message_of(text, reasoning, calls)} if is_chat else {"text": text}),
        **({} if logprobs is None else {"logprobs": logprobs}),
        "finish_reason": CALLED if calls is not None and finish_reason == "stop" else finish_reason,
        "token_ids_sha256": tokens_sha256(token_ids),
    }
    asks_for_ids = record.job.sampling.return_token_ids
    of_prompt: dict[str, Any] = {} if prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs}
    of_prompt |= {"prompt_token_ids": unpacked(record.prompt_token_ids)} if asks_for_ids else {}
    choice |= ({} if is_chat else of_prompt) | ({"token_ids": token_ids.tolist()} if asks_for_ids else {})
    choice |= {IGNORED: list(ignored_keywords)} if ignored_keywords else {}
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{record.job_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        **({} if record.job.lora is None else {"lora": record.job.lora.name}),
        "system_fingerprint": system_fingerprint,
        "choices": [choice],
        **(of_prompt if is_chat else {}),
        "usage": _usage(record.num_prompt_tokens, len(token_ids), reasoning),
        "metrics": {name: _finite(value) for name, value in metrics.items()},
    }
    return _line(record, {"status_code": 200, "request_id": run_id, "body": body}, None)


CALLED = "tool_calls"  # finish reason of a text with calls, in place of "stop"


def message_of(text: str, reasoning: Reasoning | None, calls: ToolCalls | None = None) -> dict[str, Any]:
    thought = None if reasoning is None else reasoning.text
    message: dict[str, Any] = {"role": "assistant", "content": text if reasoning is None else reasoning.content}
    if calls is not None:
        thought = calls.thought if thought is None else thought
        message |= {"content": calls.content, "tool_calls": calls.tool_calls}
    return message if thought is None else {"role": "assistant", "reasoning_content": thought, **message}


def shown_text(choice: Mapping[str, Any]) -> str:
    """Return a choice's thought, text and calls as one text."""
    message = choice.get("message")
    if message is None:
        return str(choice["text"])
    calls = "\n".join(json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ()))
    return f"{message.get('reasoning_content') or ''}{message['content'] or ''}{calls}"


def _usage(num_prompt_tokens: int, num_completion_tokens: int, reasoning: Reasoning | None) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }
    if reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning.num_tokens}
    return usage


def tokens_sha256(token_ids: NDArray[np.uint32]) -> str:
    """Return the SHA-256 in hexadecimal of tokens [num_tokens] as little-endian uint32."""
    return hashlib.sha256(token_ids.astype("<u4", copy=False).tobytes()).hexdigest()


def error_line(job: JobRecord | JobEntry, code: str, message: str) -> dict[str, Any]:
    """Return a failed job's output line; `code` is one word, `message` one sentence."""
    return _line(job, None, {"code": code, "message": message})


def _line(job: JobRecord | JobEntry, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": line_id(job.job_id), "custom_id": job.custom_id, "response": response, "error": error}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Readers of output lines.


LINE_ID = "batch_req_"  # the job's id follows it
TOKEN_COLUMNS = ("prompt_token_ids", "token_ids")
IGNORED = "ignored_schema_keywords"


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class _Message(_Part):
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _has_text_or_calls(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("found a message without text and calls")
        return self


class _Choice(_Part):
    finish_reason: str
    text: str | None = None
    message: _Message | None = None
    logprobs: dict[str, Any] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    ignored_schema_keywords: list[str] | None = None

    @model_validator(mode="after")
    def _has_text(self) -> Self:
        given = self.model_fields_set & {"text", "message"}
        if not given or any(getattr(self, name) is None for name in given):
            raise ValueError("found a choice without a text")
        return self


class _Usage(_Part):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)


class _Body(_Part):
    choices: list[_Choice] = Field(min_length=1)
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    usage: _Usage
    metrics: dict[str, Any]
    created: int = 0
    system_fingerprint: str | None = None


class _Response(_Part):
    body: _Body


class _Error(_Part):
    code: str
    message: str


class _Line(_Part):
    model_config = ConfigDict(extra="forbid")  # every field goes into the output

    id: str | None = None
    custom_id: str
    response: _Response | None
    error: _Error | None

    @model_validator(mode="after")
    def _has_one_of_them(self) -> Self:
        if (self.response is None) == (self.error is None):
            raise ValueError("found both or none of response and error, expected one")
        return self

    def refuse_other(self, job_id: str, fingerprint: str | None) -> None:
        """Raise ValueError for another job's or run's line."""
        said = None if self.response is None else self.response.body.system_fingerprint
        wanted = fingerprint or said or ""
        found_id, found_fingerprint = job_id if self.id is None else self.id.removeprefix(LINE_ID), said or wanted
        if (found_id, found_fingerprint) == (job_id, wanted):
            return  # lines of a million results end here
        expected = Identity(job_id=job_id, fingerprint=wanted)
        found = Identity(job_id=found_id, fingerprint=found_fingerprint)
        if (problem := expected.difference(found)) is not None:
            raise ValueError(problem)


def line_id(job_id: str) -> str:
    return f"{LINE_ID}{job_id}"


def num_completion_tokens(line: dict[str, Any]) -> int:
    return int(line["response"]["body"]["usage"]["completion_tokens"])


def texts_of(body: dict[str, Any], choice: dict[str, Any]) -> dict[str, str | None]:
    """Return a choice's texts as columns; log-probabilities as JSON."""
    of_prompt = (body | choice).get("prompt_logprobs")  # a chat has them in the body
    message = choice.get("message") or {"content": choice.get("text")}
    reasoning, logprobs, calls = message.get("reasoning_content"), choice.get("logprobs"), message.get("tool_calls")
    return {
        "text": plain(message["content"] or ""),
        "reasoning_content": None if reasoning is None else plain(reasoning),
        "finish_reason": plain(choice["finish_reason"]),
        "logprobs": None if logprobs is None else json.dumps(logprobs),
        "tool_calls": None if calls is None else json.dumps(calls),
        "prompt_logprobs": None if of_prompt is None else json.dumps(of_prompt),
    }


def lists_of(body: dict[str, Any], choice: dict[str, Any]) -> dict[str, list[Any] | None]:
    """Return the lists of a choice and its prompt as columns: token ids if asked for, and ignored keywords."""
    said = body | choice  # a chat has its prompt's in the body
    return {name: said.get(name) for name in (*TOKEN_COLUMNS, IGNORED)}


def plain(text: str) -> str:
    """Escape lone surrogates, which a table can't hold."""
    return text.encode(errors="backslashreplace").decode()


def is_plain_result(text: bytes, job_id: str, fingerprint: str | None) -> bool:
    """Return whether a line is this job's result exactly as `dump_line` writes it.

    If not, the line may still be right: parse it, at a far higher cost.
    """
    head = _RESULT_HEAD.match(text)
    if head is None or fingerprint is None or not text.endswith(_RESULT_END):
        return False
    if head[1] != job_id.encode() or head[2] != fingerprint.encode():
        return False
    return b"\x7f" not in text if text.isascii() else _has_no_controls(text)


def _has_no_controls(text: bytes) -> bool:
    try:
        return NOT_TEXT.search(text.decode()) is None
    except UnicodeDecodeError:
        return False


def parse_line(data: bytes, job_id: str, fingerprint: str | None) -> dict[str, Any]:
    """Parse an output line. Raises ValueError, also for another job's line."""
    try:
        line: dict[str, Any] = _decoded(data)
        found = _Line.model_validate(line)
    except ValidationError as error:
        raise ValueError(" ".join(reasons(error, _Line).split())) from None
    except RecursionError:
        raise ValueError("found JSON that is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"found no JSON: {error}") from None
    found.refuse_other(job_id, fingerprint)
    return line


def _decoded(data: bytes) -> Any:
    with suppress(ValueError):  # it refuses lone surrogates
        return from_json(data, allow_inf_nan=False)
    return json.loads(data)


_TEXT = rb'"(?:[^"\\]|\\.)*"'
_RESULT_HEAD = re.compile(
    rb'\{"id": "batch_req_([^"\\]+)", "custom_id": ' + _TEXT + rb', "response": \{"status_code": 200, "request_id": '
    rb'"[^"\\]*", "body": \{"id": "(?:chat)?cmpl-[^"\\]+", "object": "[a-z._]+", "created": \d+, "model": '
    + _TEXT
    + rb', "system_fingerprint": "([^"\\]+)", "choices": \[\{"index": 0, '
    rb'"(?:text": "|message": \{"role": "assistant", )'
)
_RESULT_END = b'}}, "error": null}'
