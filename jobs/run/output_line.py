"""Output lines in the form of OpenAI Batch."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.jobs.run.output_line_parsing import line_id


@dataclass(frozen=True)
class Reasoning:
    """A thought without markers, its tokens, and the rest of the output."""

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
    """Return a finished job's output line; `token_ids` are all generated tokens.

    A metric that is not finite becomes null. `reasoning` is None for a model without thoughts.
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
    """Return the SHA-256 in hexadecimal of tokens [num_tokens] as little-endian uint32."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<u4").tobytes()).hexdigest()


def error_line(job: JobRecord | JobEntry, code: str, message: str) -> dict[str, Any]:
    """Return a failed job's output line; `code` is one word, `message` one sentence."""
    return _line(job, None, {"code": code, "message": message})


def _line(job: JobRecord | JobEntry, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": line_id(job.job_id), "custom_id": job.custom_id, "response": response, "error": error}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
