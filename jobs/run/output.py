"""`output.jsonl` and `output.parquet` with joined choices, in bounded memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import IO, Any, BinaryIO

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.json_records import dump_line
from swiftbatch.jobs.run.job_table import in_groups
from swiftbatch.jobs.run.output_line import IGNORED, TOKEN_COLUMNS, line_id, lists_of, plain, texts_of
from swiftbatch.jobs.storage.store import Store, StoreError, new_spool, spool

MAX_MESSAGES = 3
CHOICES_FAILED = "choices_failed"  # error code of a line whose choices failed with different codes

Line = dict[str, Any]


def joined(entries: Iterable[tuple[JobRecord, Line | None]]) -> Iterator[Line]:
    """Yield output lines with joined choices; a line is left out until each choice has a result or an error.

    `entries` are jobs in input order, each with its own line or None.
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
    """Join a line's choices; its body lists `failed_choices`."""
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


NUM_ROWS_PER_GROUP = 64
MAX_CHARACTERS_PER_GROUP = 32 * 2**20
CHARACTERS_PER_NUMBER = 36  # bytes of a token id in a list of Python's

TEXT_COLUMNS = (
    *("custom_id", "status", "text", "reasoning_content", "finish_reason", "logprobs"),
    *("tool_calls", "prompt_logprobs", "error_code", "error_message"),
)
COUNT_COLUMNS = ("choice_index", "prompt_tokens", "completion_tokens")
FIXED_COLUMNS = {*TEXT_COLUMNS, *COUNT_COLUMNS, *TOKEN_COLUMNS, IGNORED}
METRIC_COLUMNS: dict[str, type] = {  # columns of every table, even without results
    **dict.fromkeys(["num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_attempts", "num_resumes"], int),
    **dict.fromkeys(["num_recovered_tokens", "num_recomputed_tokens", "num_rewinds", "num_rewound_tokens"], int),
    **dict.fromkeys(["mean_acceptance_length", "ms_per_token"], float),
    **dict.fromkeys(["distinct_1", "distinct_2", "distinct_3", "distinct_4"], float),
}


def write_output(store: Store, lines: Iterable[dict[str, Any]], check: Callable[[], None]) -> None:
    """Write both files. Raises `StoreError`.

    Calls `check` before it replaces anything.
    """
    with spool() as jsonl, spool() as table:
        _put_together(jsonl, table, lines)
        check()
        for path, file in (("output.jsonl", jsonl), ("output.parquet", table)):
            file.seek(0)
            store.write_from(path, file)


def write_table(target: IO[bytes], lines: Iterable[dict[str, Any]]) -> None:
    """Write only the Parquet file. Raises `StoreError`."""
    with new_spool() as table:  # without `told_of_room`, since the target may fail in other ways
        with spool() as jsonl:
            _put_together(jsonl, table, lines)
            table.seek(0)
        shutil.copyfileobj(table, target)


def _put_together(jsonl: BinaryIO, table: BinaryIO, lines: Iterable[dict[str, Any]]) -> None:
    metric_types = _write_lines(jsonl, lines)
    _write_table(table, (row for line in jsonl for row in _rows(json.loads(line))), metric_types)


def _write_lines(target: BinaryIO, lines: Iterable[dict[str, Any]]) -> dict[str, type]:
    metric_types = dict(METRIC_COLUMNS)
    for line in lines:
        target.write(dump_line(line))
        for row in _rows(line):
            _note_types(row, metric_types)
    target.seek(0)
    return metric_types


def _rows(line: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per choice."""
    if line["error"] is not None:
        return [_failure(line, line["error"])]
    body = line["response"]["body"]
    rows = [_row(line, choice, body | choice) for choice in body["choices"]]
    return rows + [
        _failure(line, failed["error"]) | {"choice_index": failed["index"]} for failed in body.get("failed_choices", ())
    ]


def _failure(line: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    return {
        "custom_id": plain(line["custom_id"]),
        "status": "cancelled" if error["code"] == "cancelled" else "failed",
        "error_code": plain(error["code"]),
        "error_message": plain(error["message"]),
    }


def _row(line: dict[str, Any], choice: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Any]:
    metrics = numbers["metrics"].items()
    return {name: value for name, value in metrics if type(value) in (int, float) and name not in FIXED_COLUMNS} | {
        "custom_id": plain(line["custom_id"]),
        "choice_index": choice.get("index", 0),
        "status": "finished",
        **texts_of(line["response"]["body"], choice),
        **lists_of(line["response"]["body"], choice),
        "prompt_tokens": numbers["usage"]["prompt_tokens"],
        "completion_tokens": numbers["usage"]["completion_tokens"],
    }


def _note_types(row: dict[str, Any], metric_types: dict[str, type]) -> None:
    """Record each metric's type; a single float value makes the whole column float."""
    for name, value in row.items():
        if name not in FIXED_COLUMNS and metric_types.get(name) is not float:
            metric_types[name] = type(value)


def _write_table(target: BinaryIO, rows: Iterator[dict[str, Any]], metric_types: dict[str, type]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    fields = [(name, pa.large_string()) for name in TEXT_COLUMNS] + [(name, pa.int64()) for name in COUNT_COLUMNS]
    fields += [(name, pa.list_(pa.int32())) for name in TOKEN_COLUMNS] + [(IGNORED, pa.list_(pa.string()))]
    fields += [(name, pa.float64() if kind is float else pa.int64()) for name, kind in sorted(metric_types.items())]
    schema = pa.schema(fields)
    with parquet.ParquetWriter(target, schema) as writer:
        for group in row_groups(rows, NUM_ROWS_PER_GROUP):
            try:
                part = pa.Table.from_pylist(group, schema=schema)
            except (pa.ArrowException, OverflowError) as error:
                first, last = group[0]["custom_id"], group[-1]["custom_id"]
                problem = f"the results of {first} to {last} have a number that fits no column: {error}"
                raise StoreError(f"{problem}; output.jsonl has them as they are") from None
            writer.write_table(part)


def row_groups(rows: Iterable[dict[str, Any]], max_rows: int) -> Iterator[list[dict[str, Any]]]:
    """Group rows into groups of at most `max_rows` rows, or fewer if the rows are long."""
    return in_groups(rows, max_rows, MAX_CHARACTERS_PER_GROUP, _num_letters)


def _num_letters(row: dict[str, Any]) -> int:
    texts = sum(len(value) for value in row.values() if isinstance(value, str))
    return texts + CHARACTERS_PER_NUMBER * sum(len(row.get(name) or ()) for name in TOKEN_COLUMNS)
