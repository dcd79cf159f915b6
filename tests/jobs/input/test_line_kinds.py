from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from swiftbatch.jobs.errors import LineError
from swiftbatch.jobs.input.line_parsing import MAX_CACHED_LINES, JobLine, ParsedLineCache, line_from_object

SEED = 3
CHAT_BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "seed": 1, "temperature": 0.5}
BATCH = {"custom_id": "first", "method": "POST"}
FIRSTS: list[dict[str, Any]] = [
    {"custom_id": "first", "prompt": "a text", "max_tokens": 5},
    {"custom_id": "first", "prompt": "a text", "seed": 4, "n": 3, "stop": ["x"], "user": "me"},
    {"custom_id": "first", "prompt": "a text", "messages": None, "max_tokens": 5, "logit_bias": {"5": 1}},
    {"custom_id": "first", "prompt": "a text", "messages": None, "logprobs": 2},  # chats express this differently
    {"custom_id": "first", "prompt": "a text", "max_tokens": 5, "min_tokens": 5},
    {"custom_id": "first", "prompt": "a text", "max_tokens": 5, "max_completion_tokens": 5},
    {"custom_id": "first", "messages": CHAT_BODY["messages"], "max_tokens": 5, "reasoning_effort": "low"},
    {**BATCH, "url": "/v1/chat/completions", "body": {**CHAT_BODY, "logprobs": True}},
    {**BATCH, "url": "/v1/completions", "body": {"prompt": "a text", "max_tokens": 5, "repetition_penalty": 1}},
]
OWN: list[dict[str, Any]] = [
    *({"custom_id": value} for value in ("other", "", "x" * 513, "caf\u00e9", "\ud800", 5, None)),
    *({"prompt": value} for value in ("other", "caf\u00e9", "\ud800", "", 5, ["a", "b"], [1, 2], [], None)),
    *({"max_tokens": value} for value in (1, 4, 0, -1, 2**31, 5.0, True, "5", None)),
    *({"seed": value} for value in (0, 2**64 - 1, 2**64, -1, -(2**63) - 1, 1.0, False, "1", None)),
    {"messages": [{"role": "system", "content": ["a", "b"]}, {"role": "user", "content": "hi", "name": "me"}]},
    *({"messages": value} for value in ([], None, "hi", [{"role": "user"}], [{"role": "user", "content": "\ud800"}])),
    {"messages": [{"role": "user", "content": "hi", "tool_calls": [1]}]},
    {"prompt": "both", "messages": [{"role": "user", "content": "both"}]},
    {"prompt": None, "messages": [{"role": "user", "content": "in place of a prompt that is null"}]},
    *({"temperature": value} for value in (1, 1.0, True, -1)),
]


def with_own(line: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Set fields of the line where its form has them."""
    if "body" not in line:
        return {**line, **own}
    around = {name: value for name, value in own.items() if name == "custom_id"}
    return {**line, **around, "body": {**line["body"], **{n: v for n, v in own.items() if n != "custom_id"}}}


def outcome(make: Callable[..., JobLine], *values: Any) -> JobLine | str:
    try:
        return make(*values)
    except LineError as error:
        return str(error)


@pytest.mark.parametrize("first", FIRSTS, ids=lambda line: "-".join(line.get("body", line)))
def test_a_line_of_a_known_kind_is_what_it_would_be_alone(first: dict[str, Any]) -> None:
    kinds = ParsedLineCache(SEED)
    assert outcome(kinds.line, first) == outcome(line_from_object, first, SEED)
    for own in OWN:
        line = with_own(first, own)
        found, expected = outcome(kinds.line, line), outcome(line_from_object, line, SEED)
        assert found == expected, own
        if isinstance(found, JobLine) and isinstance(expected, JobLine):
            limits = [9] * max(1, len(found.prompts))
            jobs = [each.jobs(limits) for each in (found, expected)]
            assert jobs[0] == jobs[1]
            assert [job.job_id("model") for job in jobs[0]] == [job.job_id("model") for job in jobs[1]]
            assert [job.model_dump_json() for job in jobs[0]] == [job.model_dump_json() for job in jobs[1]]


def test_lines_of_a_known_kind_are_not_checked_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, read = ParsedLineCache(SEED), []

    def note(values: dict[str, Any], run_seed: int, _defaults: object) -> JobLine:
        read.append(values)
        return line_from_object(values, run_seed)

    monkeypatch.setattr("swiftbatch.jobs.input.line_parsing.line_from_object", note)
    for number in range(5):
        kinds.line({"custom_id": f"job-{number}", "prompt": f"text {number}", "max_tokens": number + 1})
    assert len(read) == 1


def test_a_file_with_a_kind_for_every_line_takes_no_more_memory_for_them() -> None:
    kinds = ParsedLineCache(SEED)
    for number in range(MAX_CACHED_LINES + 5):
        kinds.line({"custom_id": "job", "prompt": "text", "user": str(number)})
    assert len(kinds._firsts) == MAX_CACHED_LINES
