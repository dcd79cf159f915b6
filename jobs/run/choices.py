"""The output line of an input line: that of its one job, or those of its choices as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.line_parts import line_id

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
