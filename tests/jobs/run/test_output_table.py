"""Rows of results: what was asked for, what lines brought along, chosen fields, and conversations."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from pyarrow import parquet

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.job import Job, JobRecord, TemplateOptions
from swiftbatch.jobs.json_records import dump_line
from swiftbatch.jobs.run import job_table
from swiftbatch.jobs.run.output_line import error_line
from swiftbatch.jobs.run.output_table import ResultFormat, table_file
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.table_rows import KeptColumns, arrow_schema
from swiftbatch.jobs.sampling_params import SamplingParams
from tests.jobs.run.run_parts import FINISHED, finish, make_record, write_result

TOOLS = ({"type": "function", "function": {"name": "f"}},)


def keeping(name: str, **kept: Any) -> JobRecord:
    return replace(make_record(name), kept=dump_line(kept)[:-1].decode() if kept else None)


def chat_record(name: str, *messages: dict[str, Any], **template: Any) -> JobRecord:
    sampling = SamplingParams(max_tokens=5, seed=1, temperature=0.5, top_p=0.9)
    url = "/v1/chat/completions"
    options = TemplateOptions(**template) if template else None
    job = Job(custom_id=name, url=url, messages=messages, template=options, sampling=sampling)
    return JobRecord(job.job_id("f1"), job, 1, 3)


def answer(run: Run, record: JobRecord, message: dict[str, Any]) -> None:
    choices = [{"message": {"role": "assistant"} | message, "finish_reason": "stop"}]
    body = FINISHED["response"]["body"] | {"choices": choices, "model": "some-model"}
    line = {"custom_id": record.custom_id, "response": {"body": body}, "error": None}
    assert write_result(run, record.job_id, line)


def written(run: Run, kind: ResultFormat, fields: Sequence[str] | None = None) -> list[dict[str, Any]]:
    with table_file(run.ended_lines(), kind, fields) as (file, _):
        if kind == "parquet":
            found: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
            return found
        return [json.loads(line) for line in file]


def test_lines_have_what_their_input_brought_along_whether_parsed_or_copied(run: Run) -> None:
    records = [
        keeping("a", metadata={"k": "\u2028 v"}, columns={"source": "book"}),
        keeping("b", columns={"n": 1.0, "deep": [{"a": None}]}),
        keeping("c"),
    ]
    run.add_jobs(records)
    for record in records:
        finish(run, record, "text")
    longer = records[0].job.model_copy(update={"sampling": SamplingParams(max_tokens=900, seed=1)})
    run.add_jobs([replace(records[0], job_id=longer.job_id("f1"), job=longer, supersedes=records[0].job_id)])
    lines = list(Run.open(run.store.uri).written_lines())
    assert lines == [dump_line(line) for line in run.joined_lines()]
    brought = [{name: line.get(name) for name in ("metadata", "columns")} for line in map(json.loads, lines)]
    assert brought == [
        {"metadata": {"k": "\u2028 v"}, "columns": {"source": "book"}},
        {"metadata": None, "columns": {"n": 1.0, "deep": [{"a": None}]}},
        {"metadata": None, "columns": None},
    ]


def test_a_table_has_what_was_asked_for_and_a_column_for_each_kept_one(run: Run) -> None:
    talk = replace(chat_record("talk", {"role": "user", "content": "Hello"}), kept='{"metadata": {"k": 1}}')
    records = [keeping("a", metadata={"k": 2}, columns={"text": "mine", "score": 1}), keeping("b"), talk]
    records[1] = replace(records[1], kept='{"columns": {"score": 0.5, "tags": ["x"]}}')
    run.add_jobs(records)
    finish(run, records[0], "text of a", 3)
    run.write_error(records[1].job_id, error_line(records[1], "cancelled", "why"))
    answer(run, talk, {"content": "Hi"})
    run.write_output()
    table = parquet.read_table(io.BytesIO(run.store.read("output.parquet") or b""))
    first, second, third = table.to_pylist()
    assert (first["prompt"], first["text"], first["input_text"]) == (records[0].job.prompt, "text of a", "mine")
    assert (third["temperature"], third["top_p"], third["seed"], third["model"]) == (0.5, 0.9, 1, "some-model")
    assert [(each["role"], each["content"]) for each in third["messages"]] == [("user", "Hello")]
    assert [row["score"] for row in (first, second, third)] == [1.0, 0.5, None]
    assert [row["tags"] for row in (first, second, third)] == [None, ["x"], None]
    assert [row["metadata"] for row in (first, second, third)] == ['{"k": 2}', None, '{"k": 1}']
    assert (second["status"], second["prompt"]) == ("cancelled", records[1].job.prompt)
    assert "revision" not in first


KINDS: list[tuple[list[Any], str, list[Any]]] = [
    ([1, 2, None], "int64", [1, 2, None]),
    ([1, 2.5], "float64", [1.0, 2.5]),
    ([True, None], "bool", [True, None]),
    ([True, 1], "string", ["true", "1"]),
    (["a", "\ud800"], "string", ["a", "\\ud800"]),
    (["a", 1], "string", ['"a"', "1"]),
    ([2**63], "string", [str(2**63)]),
    ([[], [1], [0.5]], "list of float64", [[], [1.0], [0.5]]),
    ([[], None], "list of string", [[], None]),
    ([["a", None]], "list of string", [["a", None]]),
    ([[1], ["a"]], "string", ["[1]", '["a"]']),
    ([[[1]], []], "string", ["[[1]]", "[]"]),
    ([{"a": 1}, None], "string", ['{"a": 1}', None]),
    ([None], "string", [None]),
]


@pytest.mark.parametrize(("values", "kind", "expected"), KINDS)
def test_a_kept_column_is_of_the_kind_that_holds_all_its_values(
    values: list[Any], kind: str, expected: list[Any]
) -> None:
    kept = [json.dumps({"columns": {"name": value}}) for value in values]
    columns = KeptColumns({"input_name", "name"})
    for text in [None, *kept]:
        columns.note(text)
    assert columns.columns() == {"input_input_name": kind}
    assert [columns.values(text)["input_input_name"] for text in kept] == expected
    assert columns.values(None) == {"input_input_name": None}


@pytest.mark.parametrize(("name", "shown"), [("\udc00", r"\udc00"), ("", "input_"), ("text", "input_text")])
def test_a_kept_column_has_a_name_that_a_table_can_hold(name: str, shown: str) -> None:
    columns = KeptColumns({"text"})
    columns.note(json.dumps({"columns": {name: 1}}))
    assert columns.columns() == {shown: "int64"}
    assert arrow_schema(columns.columns()).names == [shown]


def test_a_value_of_another_kind_than_earlier_tables_have_goes_beside_them(run: Run) -> None:
    first = KeptColumns(set())
    first.note(json.dumps({"columns": {"x": 1, "y": ["a"]}}))
    later = KeptColumns(set(), first.kinds())
    kept = [
        json.dumps({"columns": values})
        for values in ({"x": 2}, {"x": 0.5, "y": "a"}, {"y": [], "x_json": "own", "x": ""})
    ]
    for text in kept:
        later.note(text)
    assert later.columns() == first.columns() | {"x_json": "string", "y_json": "string", "x_json_json": "string"}
    assert [{name: value for name, value in later.values(text).items() if value is not None} for text in kept] == [
        {"x": 2},
        {"x_json": "0.5", "y_json": '"a"'},
        {"y": [], "x_json": "own", "x_json_json": '""'},
    ]


def test_fields_are_columns_in_the_order_that_was_said_and_an_unknown_one_names_the_known(run: Run) -> None:
    record = keeping("a", columns={"source": "book"})
    run.add_jobs([record])
    finish(run, record, "text of a")
    fields = ["source", "text", "custom_id"]
    for kind in ("jsonl", "parquet", "chat"):
        [row] = written(run, kind, fields)
        assert list(row.items()) == [("source", "book"), ("text", "text of a"), ("custom_id", "a")]
    with pytest.raises(UserError, match=r"--fields: found 'sauce', expected some of: custom_id, .*, source"):
        written(run, "jsonl", ["text", "sauce"])
    with pytest.raises(UserError, match="found 'tools'"):
        written(run, "parquet", ["tools"])


def test_a_chat_is_its_messages_and_the_answer_and_a_prompt_a_user_s_message(run: Run) -> None:
    hello = {"role": "user", "content": "Hello"}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]}
    talk, calls = chat_record("talk", parts), chat_record("calls", hello, tools=TOOLS)
    goes_on = chat_record("goes-on", hello, {"role": "assistant", "content": "Well, "}, continue_final_message=True)
    echo = make_record("echo").job
    echo = echo.model_copy(update={"sampling": echo.sampling.model_copy(update={"echo": True})})
    ids = make_record("ids").job.model_copy(update={"prompt": None, "prompt_ids": (1, 2)})
    called = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    told = {"role": "tool", "content": "4", "tool_call_id": "a"}
    records = [talk, calls, goes_on, make_record("plain"), chat_record("told", hello, called, told)]
    records += [JobRecord(job.job_id("f1"), job, 1, 3) for job in (echo, ids)] + [make_record("failed")]
    run.add_jobs(records)
    answer(run, talk, {"reasoning_content": "Hm.", "content": "Yes"})
    answer(run, calls, {"content": None, "tool_calls": [call]})
    answer(run, goes_on, {"content": "yes"})
    finish(run, records[3], "said")
    answer(run, records[4], {"content": "Four."})
    finish(run, records[5], f"{echo.prompt} said")
    finish(run, records[6], "said")
    run.write_error(records[7].job_id, error_line(records[7], "cancelled", "why"))
    prompt = {"role": "user", "content": echo.prompt}
    with table_file(run.ended_lines(), "chat") as (file, num_left_out):
        assert [json.loads(line) for line in file] == [
            {
                "messages": [
                    {"role": "user", "content": "One\ntwo"},
                    {"role": "assistant", "reasoning_content": "Hm.", "content": "Yes"},
                ]
            },
            {"messages": [hello, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": list(TOOLS)},
            {"messages": [hello, {"role": "assistant", "content": "Well, yes"}]},
            {"messages": [prompt, {"role": "assistant", "content": "said"}]},
            {"messages": [hello, called, told, {"role": "assistant", "content": "Four."}]},
            {"messages": [prompt, {"role": "assistant", "content": " said"}]},
        ]
    assert num_left_out == 2
    assert list(written(run, "chat", ["custom_id", "tools"])[0].items()) == [("custom_id", "talk"), ("tools", None)]


def test_a_table_of_jobs_of_an_earlier_version_brings_nothing_along(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = job_table.table_schema()
    earlier = earlier.remove(earlier.get_field_index("kept"))
    record = make_record("a")
    with monkeypatch.context() as patch:
        patch.setattr(job_table, "table_schema", lambda: earlier)
        real = job_table._row
        patch.setattr(job_table, "_row", lambda each: real(each)[:-1])
        patch.setattr(job_table, "_size", lambda row: 0)
        run.add_jobs([record])
    finish(run, record, "text")
    run.add_jobs([keeping("b", metadata=1)])
    finish(run, run.jobs()[1], "text")
    assert [each.kept for each in run.jobs()] == [None, '{"metadata": 1}']
    assert [json.loads(line).get("metadata") for line in run.written_lines()] == [None, 1]
