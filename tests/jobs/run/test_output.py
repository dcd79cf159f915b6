"""A line with choices is one output line."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from swiftbatch.jobs.input.line_parsing import JobLine
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.output_line import Reasoning, error_line, success_line
from swiftbatch.jobs.run.output_table import table_file
from swiftbatch.jobs.run.result_files import ResultSegment
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.table_rows import row_groups
from swiftbatch.jobs.storage.store import StoreError
from tests.jobs.run import run_parts
from tests.jobs.run.run_parts import make_record, write_result


def records_of(*prompts: str, n: int = 1) -> list[JobRecord]:
    """Return the jobs of a line, with one prompt token per letter."""
    line = JobLine("many", prompts, None, None, {"seed": 1}, n, 5)
    jobs = line.jobs([5] * len(prompts))
    return [JobRecord(job.job_id("f1"), job, 2, len(job.prompt or "")) for job in jobs]


def finish(run: Run, record: JobRecord) -> None:
    index = record.job.choice_index
    assert run_parts.finish(run, record, f"text {index}", 3 + index, num_drafts=index)


def fail(run: Run, records: Sequence[JobRecord], code: str = "cancelled", message: str = "why") -> None:
    for record in records:
        run.write_error(record.job_id, error_line(record, code, message))


def output(run: Run) -> list[dict[str, Any]]:
    run.write_output()
    lines = [json.loads(line) for line in run.store.read("output.jsonl").splitlines()]
    assert [json.loads(json.dumps(line)) for line in run.joined_lines()] == lines
    return lines


def rows(run: Run) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = parquet.read_table(io.BytesIO(run.store.read("output.parquet") or b"")).to_pylist()
    return found


def test_all_choices_are_one_line_in_its_place_once_all_have_ended(run: Run) -> None:
    before, after, choices = make_record("before"), make_record("after"), records_of("abc", n=3)
    run.add_jobs([before, *choices, after])
    for record in (after, before, choices[2], choices[0]):
        finish(run, record)
    assert [line["custom_id"] for line in output(run)] == ["before", "after"]
    finish(run, choices[1])
    _, line, _ = output(run)
    assert line["id"] == f"batch_req_{choices[0].job_id}"
    assert (line["custom_id"], line["error"]) == ("many", None)
    body = line["response"]["body"]
    assert body["id"] == f"cmpl-{choices[0].job_id}"
    assert [(each["index"], each["text"]) for each in body["choices"]] == [(0, "text 0"), (1, "text 1"), (2, "text 2")]
    assert [each["metrics"] for each in body["choices"]] == [{"num_drafts": number} for number in range(3)]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3 + 4 + 5, "total_tokens": 3 + 12}
    assert not {"metrics", "failed_choices"} & body.keys()


@pytest.mark.parametrize("is_chat", [False, True])
def test_token_ids_are_columns_that_are_null_where_no_line_asked(run: Run, is_chat: bool) -> None:
    plain, asking = make_record("plain"), make_record("asking")
    run.add_jobs([plain, asking])
    run_parts.finish(run, plain, "text", 2)
    body = run_parts.FINISHED["response"]["body"]
    prompt, choice = {"prompt_token_ids": [1, 2**31 - 1]}, {"text": "t", "token_ids": [7, 8], "finish_reason": "stop"}
    body = body | {"choices": [choice | ({} if is_chat else prompt)]} | (prompt if is_chat else {})
    write_result(run, asking.job_id, {"custom_id": "asking", "response": {"body": body}, "error": None})
    output(run)
    assert [(row["prompt_token_ids"], row["token_ids"]) for row in rows(run)] == [
        (None, None),
        ([1, 2**31 - 1], [7, 8]),
    ]
    schema = parquet.read_schema(io.BytesIO(run.store.read("output.parquet") or b""))
    assert [str(schema.field(name).type.value_type) for name in ("prompt_token_ids", "token_ids")] == ["int32"] * 2


def test_lists_of_token_ids_keep_the_groups_of_a_table_small() -> None:
    rows = [{"custom_id": "a", "token_ids": [5] * 100_000}] * 30
    assert max(map(len, row_groups(iter(rows), 64))) < 15


def test_what_was_thought_is_counted_over_all_choices(run: Run) -> None:
    choices = records_of("abc", n=2)
    run.add_jobs(choices)
    for record in choices:
        ids, thought = np.arange(5, dtype=np.uint32), Reasoning("hm", "so", 2 + record.job.choice_index)
        line = success_line(
            record,
            "run-1",
            "hm so",
            "length",
            model="m",
            system_fingerprint=run.manifest.fingerprint,
            token_ids=ids,
            metrics={},
            reasoning=thought,
        )
        assert write_result(run, record.job_id, line)
    ((line),) = output(run)
    assert line["response"]["body"]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 + 3}


def test_each_distinct_prompt_is_counted_once(run: Run) -> None:
    choices = records_of("a", "bcd", "a", n=2)
    run.add_jobs(choices)
    for record in choices:
        finish(run, record)
    ((line),) = output(run)
    assert line["response"]["body"]["usage"]["prompt_tokens"] == 1 + 3
    assert len(line["response"]["body"]["choices"]) == 6


def test_choices_without_a_result_are_named_beside_those_with_one(run: Run) -> None:
    choices = records_of("abc", n=3)
    run.add_jobs(choices)
    fail(run, choices[:1], "attempts_failed", "given up")
    finish(run, choices[1])
    assert output(run) == []
    fail(run, choices[2:])
    (line,) = output(run)
    body = line["response"]["body"]
    assert line["error"] is None
    assert [choice["index"] for choice in body["choices"]] == [1]
    assert body["id"] == f"cmpl-{choices[0].job_id}"
    assert body["failed_choices"] == [
        {"index": 0, "error": {"code": "attempts_failed", "message": "given up"}},
        {"index": 2, "error": {"code": "cancelled", "message": "why"}},
    ]
    found = [(row["choice_index"], row["status"], row["text"], row["error_code"]) for row in rows(run)]
    assert sorted(found) == [
        (0, "failed", None, "attempts_failed"),
        (1, "finished", "text 1", None),
        (2, "cancelled", None, "cancelled"),
    ]


def test_a_line_none_of_whose_choices_has_a_result_is_an_error(run: Run) -> None:
    choices = records_of("abc", n=3)
    run.add_jobs(choices)
    fail(run, choices)
    (line,) = output(run)
    assert line["response"] is None
    assert line["error"] == {"code": "cancelled", "message": "all 3 choices: why"}
    fail(run, choices[1:2], "attempts_failed", "given up")
    (line,) = output(run)
    assert line["error"] == {"code": "choices_failed", "message": "all 3 choices: why; given up"}
    found = [(row["custom_id"], row["choice_index"], row["status"], row["error_message"]) for row in rows(run)]
    assert found == [
        *(("many", 0, "cancelled", "why"), ("many", 1, "failed", "given up"), ("many", 2, "cancelled", "why")),
    ]


def test_a_table_has_a_row_for_each_choice_with_its_own_numbers(run: Run) -> None:
    choices = records_of("a", "bcd")
    run.add_jobs([*choices, make_record("one")])
    for record in run.jobs():
        finish(run, record)
    output(run)
    names = ("custom_id", "choice_index", "text", "prompt_tokens", "completion_tokens", "num_drafts")
    assert [tuple(row[name] for name in names) for row in rows(run)] == [
        ("many", 0, "text 0", 1, 3, 0),
        ("many", 1, "text 1", 3, 4, 1),
        ("one", 0, "text 0", 3, 3, 0),
    ]


def test_a_number_that_fits_no_column_is_told_with_its_job(run: Run) -> None:
    record = make_record("huge")
    run.add_jobs([record])
    line = success_line(
        *(record, "run-1", "text", "length"),
        model="m",
        system_fingerprint=run.manifest.fingerprint,
        token_ids=np.arange(3, dtype=np.uint32),
        metrics={"num_drafts": 10**20},
    )
    run.write_segment("s", ResultSegment([(record.job_id, line)]))
    refused = pytest.raises(StoreError, match="results of huge to huge have a number that fits no column")
    with refused, table_file(run.ended_lines()):
        pass


def test_what_two_commands_add_at_once_is_one_line(run: Run) -> None:
    choices = records_of("abc", n=2)
    run.add_jobs(choices)
    known = run.store.read("jobs.parquet") or b""
    run.store.write("jobs/000002-x.parquet", known)
    for record in choices:
        finish(run, record)
    assert len(output(run)) == 1
