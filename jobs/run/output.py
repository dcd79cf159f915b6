"""`output.jsonl` with joined choices, and `output.parquet`, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, BinaryIO

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.json_records import dump_line
from swiftbatch.jobs.run.output_line import line_id
from swiftbatch.jobs.run.output_table import EndedLine, OutputTable
from swiftbatch.jobs.storage.store import Store, spool

MAX_MESSAGES = 3
CHOICES_FAILED = "choices_failed"  # error code of a line whose choices failed with different codes

Line = dict[str, Any]


def ended_lines(entries: Iterable[tuple[JobRecord, Line | None]]) -> Iterator[EndedLine]:
    """Yield the choices of each input line once each of them has a result or an error.

    `entries` are jobs in input order, each with its own line or None.
    """
    for (_, num_choices), group in groupby(
        entries, key=lambda entry: (entry[0].job.custom_id, entry[0].job.num_choices)
    ):
        if num_choices == 1:
            yield from ([(record, line)] for record, line in group if line is not None)
            continue
        choices = list(group)
        ended = [(record, line) for record, line in choices if line is not None]
        if len(ended) == len(choices):
            yield ended


def joined(choices: EndedLine) -> Line:
    """Return the output line of all choices, with what its input line brought along."""
    record, line = choices[0]
    kept: Line = json.loads(record.kept or "{}")
    return (line if record.job.num_choices == 1 else _join(choices)) | kept


def with_kept(line: bytes, kept: bytes) -> bytes:
    """Return an encoded output line with what its input line brought along, if anything."""
    return b"%s, %s\n" % (line[:-2], kept[1:]) if kept else line


def _join(choices: EndedLine) -> Line:
    """Join several choices; the body lists `failed_choices`."""
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
    numbers = {"usage": body["usage"], "metrics": body["metrics"]}
    return dict(body["choices"][0], index=record.job.choice_index, **numbers)


def _usage(bodies: Sequence[tuple[JobRecord, Line]]) -> dict[str, Any]:
    """Sum the tokens of all completions and thoughts, and of each distinct prompt once."""
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
    codes = {error["code"] for _, error in failed}
    messages = list(dict.fromkeys(error["message"] for _, error in failed))
    more = f"; and {len(messages) - MAX_MESSAGES} more" if len(messages) > MAX_MESSAGES else ""
    return {
        "code": codes.pop() if len(codes) == 1 else CHOICES_FAILED,
        "message": f"all {len(failed)} choices: {'; '.join(messages[:MAX_MESSAGES])}{more}",
    }


def write_output(store: Store, lines: Iterable[EndedLine], check: Callable[[], None]) -> None:
    """Write both files. Raises `StoreError`.

    Calls `check` before it replaces anything.
    """
    with spool() as jsonl, spool() as table, spool() as rows:
        OutputTable(rows, _written(lines, jsonl)).write_parquet(table)
        check()
        for path, file in (("output.jsonl", jsonl), ("output.parquet", table)):
            file.seek(0)
            store.write_from(path, file)


def _written(lines: Iterable[EndedLine], target: BinaryIO) -> Iterator[EndedLine]:
    """Yield the lines after they are written."""
    for line in lines:
        target.write(dump_line(joined(line)))
        yield line
