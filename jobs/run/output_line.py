"""Output lines in the form of OpenAI Batch: that of a line's one job, or of its choices as one."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.jobs.run.line_parts import line_id


@dataclass(frozen=True)
class Reasoning:
    """A model's thought in an output: its text and its tokens, without markers, and the output's text without it."""

    text: str
    content: str
    num_tokens: int


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
) -> dict[str, Any]:
    """The output line of a finished job; `token_ids` [num_completion_tokens] are the generated tokens.

    `system_fingerprint` is that of the run's manifest.
    `logprobs` are what the choice has of that name, where the job asks for them.
    A metric that is not finite becomes null: JSON has no NaN. `usage` follows from the record and `token_ids`.
    `reasoning` is None for a model that does not think; a chat has it apart from what it says.
    """
    is_chat = record.job.messages is not None
    num_completion_tokens = len(token_ids)
    choice = {
        "index": record.job.choice_index,
        **({"message": _message(text, reasoning)} if is_chat else {"text": text}),
        **({} if logprobs is None else {"logprobs": logprobs}),
        "finish_reason": finish_reason,
        "token_ids_sha256": tokens_sha256(token_ids),
    }
    usage: dict[str, Any] = {
        "prompt_tokens": record.num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": record.num_prompt_tokens + num_completion_tokens,
    }
    if reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning.num_tokens}
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{record.job_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": system_fingerprint,
        "choices": [choice],
        "usage": usage,
        "metrics": {name: _finite(value) for name, value in metrics.items()},
    }
    return _line(record, {"status_code": 200, "request_id": run_id, "body": body}, None)


def _message(text: str, reasoning: Reasoning | None) -> dict[str, str]:
    if reasoning is None:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "reasoning_content": reasoning.text, "content": reasoning.content}


def tokens_sha256(token_ids: NDArray[np.uint32]) -> str:
    """The SHA-256, in hexadecimal, of tokens [num_tokens] as a result names it: of 4 bytes each, little-endian."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<u4").tobytes()).hexdigest()


def error_line(job: JobRecord | JobEntry, code: str, message: str) -> dict[str, Any]:
    """The output line of a job that did not finish; `code` is a word such as "cancelled", `message` one sentence."""
    return _line(job, None, {"code": code, "message": message})


def _line(job: JobRecord | JobEntry, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": line_id(job.job_id), "custom_id": job.custom_id, "response": response, "error": error}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


MAX_MESSAGES = 3
CHOICES_FAILED = "choices_failed"  # the error code of a line whose choices ended with several codes

Line = dict[str, Any]


def joined(entries: Iterable[tuple[JobRecord, Line | None]]) -> Iterator[Line]:
    """The lines that are whole, in order: a line of several choices is so when each has a result or an error.

    `entries` are the jobs in input order, the choices of a line in theirs, each with its own output line.
    """
    for (_, num_choices), group in groupby(
        entries, key=lambda entry: (entry[0].job.custom_id, entry[0].job.num_choices)
    ):
        if num_choices == 1:
            yield from (line for _, line in group if line is not None)
            continue
        choices = list(group)
        ended = [(record, line) for record, line in choices if line is not None]
        if len(ended) == len(choices):
            yield _join(ended)


def _join(choices: Sequence[tuple[JobRecord, Line]]) -> Line:
    """One line of all choices; `failed_choices` of its body are those without a result, where others have one."""
    first = choices[0][0]
    head = {"id": line_id(first.job_id), "custom_id": first.job.custom_id}
    finished = [(record, line["response"]) for record, line in choices if line["error"] is None]
    failed = [(record, line["error"]) for record, line in choices if line["error"] is not None]
    if not finished:
        return head | {"response": None, "error": _error(failed)}
    response = finished[0][1]
    bodies = [(record, response["body"]) for record, response in finished]
    body = {name: value for name, value in response["body"].items() if name != "metrics"} | {
        "id": f"{'cmpl' if first.job.messages is None else 'chatcmpl'}-{first.job_id}",
        "created": max(body.get("created", 0) for _, body in bodies),
        "choices": [_choice(record, body) for record, body in bodies],
        "usage": _usage(bodies),
    }
    if failed:
        body["failed_choices"] = [{"index": record.job.choice_index, "error": error} for record, error in failed]
    return head | {"response": response | {"body": body}, "error": None}


def _choice(record: JobRecord, body: Line) -> dict[str, Any]:
    """One choice, with what its own line says of it alone."""
    numbers = {"usage": body["usage"], "metrics": body["metrics"]}
    return dict(body["choices"][0], index=record.job.choice_index, **numbers)


def _usage(bodies: Sequence[tuple[JobRecord, Line]]) -> dict[str, Any]:
    """The tokens of each distinct prompt once, and those of all completions, with those that were thought."""
    prompts = {(record.job.prompt, record.job.prompt_ids): body["usage"]["prompt_tokens"] for record, body in bodies}
    num_prompt_tokens = sum(prompts.values())
    num_completion_tokens = sum(body["usage"]["completion_tokens"] for _, body in bodies)
    details = [body["usage"].get("completion_tokens_details") for _, body in bodies]
    thought = [each["reasoning_tokens"] for each in details if each is not None]
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        **({"completion_tokens_details": {"reasoning_tokens": sum(thought)}} if thought else {}),
    }


def _error(failed: Sequence[tuple[JobRecord, Line]]) -> dict[str, str]:
    """The error of a line none of whose choices has a result."""
    codes = {error["code"] for _, error in failed}
    messages = list(dict.fromkeys(error["message"] for _, error in failed))
    more = f"; and {len(messages) - MAX_MESSAGES} more" if len(messages) > MAX_MESSAGES else ""
    return {
        "code": codes.pop() if len(codes) == 1 else CHOICES_FAILED,
        "message": f"all {len(failed)} choices: {'; '.join(messages[:MAX_MESSAGES])}{more}",
    }
