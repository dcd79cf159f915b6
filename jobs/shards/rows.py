"""The rows of shards: one for each choice of a line, with the same typed columns in all of them.

What is in a row follows from the job and its tokens alone, so a shard that is made again has the same bytes.
"""

from __future__ import annotations

import json
from typing import Any

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.output_line import texts_of
from swiftbatch.jobs.shards.plans import Failure

Row = dict[str, Any]

MESSAGE = ("role", "content", "name")
COLUMNS: dict[str, str] = {  # with their types, by names that Arrow and `datasets` share
    "custom_id": "string",
    "choice_index": "int64",
    "revision": "int64",
    "status": "string",
    "prompt": "string",
    "prompt_ids": "list of int64",
    "messages": "list of messages",
    "text": "string",
    "reasoning_content": "string",
    "finish_reason": "string",
    "error_code": "string",
    "error_message": "string",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "seed": "int64",
    "max_tokens": "int64",
    "temperature": "float64",
    "sampling": "string",
    "token_ids_sha256": "string",
    "logprobs": "string",
    "job_id": "string",
}


def finished_row(record: JobRecord, revision: int, line: dict[str, Any]) -> Row:
    """The row of a job with a result; `line` is its own output line."""
    body = line["response"]["body"]
    choice = body["choices"][0]
    return _asked(record, revision) | {
        "status": "finished",
        **texts_of(choice),
        "error_code": None,
        "error_message": None,
        "completion_tokens": body["usage"]["completion_tokens"],
        "token_ids_sha256": choice.get("token_ids_sha256"),
    }


def failed_row(record: JobRecord, revision: int, failure: Failure) -> Row:
    """The row of a job without a result."""
    return _asked(record, revision) | {
        "status": "cancelled" if failure.code == "cancelled" else "failed",
        "text": None,
        "reasoning_content": None,
        "finish_reason": None,
        "logprobs": None,
        "error_code": failure.code,
        "error_message": failure.message,
        "completion_tokens": None,
        "token_ids_sha256": None,
    }


def _asked(record: JobRecord, revision: int) -> Row:
    """The columns of a row that say what the line asked for."""
    job = record.job
    messages = job.messages and [{name: getattr(message, name) for name in MESSAGE} for message in job.messages]
    return {
        "custom_id": job.custom_id,
        "choice_index": job.choice_index,
        "revision": revision,
        "prompt": job.prompt,
        "prompt_ids": None if job.prompt_ids is None else list(job.prompt_ids),
        "messages": messages,
        "prompt_tokens": record.num_prompt_tokens,
        "seed": job.sampling.seed,
        "max_tokens": job.sampling.max_tokens,
        "temperature": job.sampling.temperature,
        "sampling": json.dumps(job.sampling.identity(), sort_keys=True),
        "job_id": record.job_id,
    }
