"""Output lines in the form of OpenAI Batch."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.job import JobRecord
from jobs.run.output_line import line_id


def success_line(
    record: JobRecord,
    run_id: str,
    text: str,
    finish_reason: str,
    *,
    model: str,
    token_ids: NDArray[np.uint32],
    metrics: Mapping[str, Any],
) -> dict[str, Any]:
    """The output line of a finished job; `token_ids` [num_completion_tokens] are the generated tokens.

    A metric that is not finite becomes null: JSON has no NaN. `usage` follows from the record and `token_ids`.
    """
    is_chat = record.job.messages is not None
    num_completion_tokens = len(token_ids)
    choice = {
        "index": record.job.choice_index,
        **({"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}),
        "finish_reason": finish_reason,
        "token_ids_sha256": tokens_sha256(token_ids),
    }
    usage = {
        "prompt_tokens": record.num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": record.num_prompt_tokens + num_completion_tokens,
    }
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{record.job_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage,
        "metrics": {name: _finite(value) for name, value in metrics.items()},
    }
    return _line(record, {"status_code": 200, "request_id": run_id, "body": body}, None)


def tokens_sha256(token_ids: NDArray[np.uint32]) -> str:
    """The SHA-256, in hexadecimal, of tokens [num_tokens] as a result names it: of 4 bytes each, little-endian."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<u4").tobytes()).hexdigest()


def error_line(record: JobRecord, code: str, message: str) -> dict[str, Any]:
    """The output line of a job that did not finish; `code` is a word such as "cancelled", `message` one sentence."""
    return _line(record, None, {"code": code, "message": message})


def _line(record: JobRecord, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": line_id(record.job_id), "custom_id": record.job.custom_id, "response": response, "error": error}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
