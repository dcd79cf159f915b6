"""A line's tools and its choice among them are checked and reach the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.job import Job, TemplateOptions
from tests.jobs.input.job_lines import CHAT, batch, read, read_lines

URL = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
F: dict[str, Any] = {"type": "function", "function": {"name": "f", "description": "does f", "parameters": SCHEMA}}
G: dict[str, Any] = {"type": "function", "function": {"name": "g"}}
NAMED = {"type": "function", "function": {"name": "g"}}


def options(tmp_path: Path, **fields: Any) -> TemplateOptions | None:
    body = {"messages": CHAT["messages"], "max_tokens": 5} | fields
    (short, long), rejects = read(tmp_path, CHAT | fields, batch(body, URL))
    assert rejects == []
    assert short.template == long.template
    assert Job.model_validate_json(short.model_dump_json()) == short
    return short.template


def test_tools_are_kept_as_they_are_written(tmp_path: Path) -> None:
    found = options(tmp_path, tools=[F, {"function": G["function"]}])
    assert found == TemplateOptions(tools=(F, G))
    assert list(found.tools[0]["function"]["parameters"]["properties"]) == ["z", "a"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", TemplateOptions(tools=(F, G))),
        (None, TemplateOptions(tools=(F, G))),
        ("none", None),
        ("required", TemplateOptions(tools=(F, G), must_call=True)),
        (NAMED, TemplateOptions(tools=(F, G), must_call=True, function="g")),
    ],
)
def test_a_choice_is_kept(tmp_path: Path, choice: Any, expected: TemplateOptions | None) -> None:
    assert options(tmp_path, tools=[F, G], tool_choice=choice) == expected


def test_each_choice_is_another_job(tmp_path: Path) -> None:
    lines = [
        CHAT | {"custom_id": str(n), "tools": [F, G], "tool_choice": c} for n, c in enumerate(("auto", "required"))
    ]
    lines.append(CHAT | {"custom_id": "2", "tools": [F, G], "tool_choice": NAMED})
    jobs, _ = read(tmp_path, *lines, CHAT | {"custom_id": "3"})
    ids = {job.model_copy(update={"custom_id": "x", "sampling": jobs[0].sampling}).job_id("f") for job in jobs}
    assert len(ids) == 4


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "'tools': found {}, expected a list of tools"),
    ({"tools": ["f"]}, "'tools[0]': found \"f\", expected an object of type function, with a function"),
    ({"tools": [F, {"type": "custom", "function": {"name": "x"}}]}, "'tools[1]': found {"),
    ({"tools": [{"type": "function"}]}, "'tools[0]': found {"),
    *(
        ({"tools": [{"function": {"name": name}}]}, "'tools[0].function.name': found")
        for name in ("", "a b", "x" * 65, "caf\u00e9", None, 5)
    ),
    ({"tools": [F, G, F]}, "'tools[2].function.name': found \"f\", expected"),
    ({"tools": [{"function": {"name": "f", "parameters": "x"}}]}, "'tools[0].function.parameters': found \"x\""),
    ({"tools": [{"function": {"name": "f", "description": "\ud800"}}]}, "'tools': found"),
    ({"tool_choice": "required"}, "'tool_choice': found \"required\" without tools"),
    ({"tool_choice": NAMED}, "'tool_choice.function.name': found \"g\", expected the name of one of the tools"),
    ({"tools": [F], "tool_choice": NAMED}, "'tool_choice.function.name': found \"g\""),
    ({"tools": [F], "tool_choice": "any"}, "'tool_choice': found \"any\", expected one of none, auto, required, or an"),
    ({"tools": [F], "tool_choice": {"type": "function", "function": {}}}, "'tool_choice.function.name': found null"),
    ({"tools": [F], "tool_choice": {"type": "allowed_tools"}}, "'tool_choice': found {"),
    ({"tools": [F], "response_format": {"type": "json_object"}}, "'tools': found it with a structured output"),
    ({"tools": [F], "structured_outputs": {"regex": "a"}}, "'tools': found it with a structured output"),
    ({"tools": [F], "tool_choice": "required", "min_tokens": 3}, "'min_tokens': found 3 with a structured output"),
    ({"tools": [F], "tool_choice": "required", "ignore_eos": True}, "'ignore_eos': found true with"),
]


@pytest.mark.parametrize(("fields", "words"), BAD)
def test_bad_tools_are_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    _, (short, long) = read(tmp_path, CHAT | fields, batch({"messages": CHAT["messages"]} | fields, URL))
    assert f"field {words}" in short.reason
    assert f"field {words.replace(chr(39), chr(39) + 'body.', 1)}" in long.reason


def test_tools_beside_a_structure_may_be_chosen_away(tmp_path: Path) -> None:
    assert options(tmp_path, tools=[F], tool_choice="none", response_format={"type": "json_object"}) is None


def test_a_completion_takes_no_tools(tmp_path: Path) -> None:
    body = {"prompt": "Once", "max_tokens": 5}
    _, (short, long, choice) = read(
        tmp_path,
        {"custom_id": "a", "tools": [F]} | body,
        batch(body | {"tools": [F]}),
        batch(body | {"tool_choice": "required"}),
    )
    assert short.reason.startswith("field 'tools': found it with a prompt")
    assert long.reason.startswith("field 'body.tools': found [")
    assert choice.reason.startswith("field 'body.tool_choice': found \"required\", not supported")


def test_false_for_parallel_calls_is_told(tmp_path: Path) -> None:
    lines, _ = read_lines(tmp_path, CHAT | {"parallel_tool_calls": False}, CHAT | {"custom_id": "b", "stream": False})
    assert [line.without_effect for line in lines] == [("parallel_tool_calls",), ()]
