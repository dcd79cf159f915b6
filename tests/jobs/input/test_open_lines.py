from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from swiftbatch.jobs.input.request_fields import NOT_KWARGS
from swiftbatch.jobs.job import Job, Message, TemplateOptions
from tests.jobs.input.job_lines import CHAT, GOOD, OPEN_LIMIT, batch, read, read_lines

OPEN = {name: value for name, value in GOOD.items() if name != "max_tokens"}


def test_a_limit_may_be_left_open_or_given_by_either_name(tmp_path: Path) -> None:
    other = [
        {"max_completion_tokens": 7},
        {"max_tokens": None, "max_completion_tokens": 7},
        {"max_tokens": 7, "max_completion_tokens": 7},
    ]
    lines, rejects = read_lines(
        tmp_path, *(OPEN | values | {"custom_id": str(number)} for number, values in enumerate([{}, *other]))
    )
    assert rejects == []
    assert [line.max_tokens for line in lines] == [None, 7, 7, 7]
    (job,), _ = read(tmp_path, OPEN | {"max_tokens": None})
    assert job.sampling.max_tokens == OPEN_LIMIT
    assert job.job_id("m") == read(tmp_path, OPEN | {"max_tokens": OPEN_LIMIT})[0][0].job_id("m")


def test_a_prompt_is_a_text_or_token_ids_alone_or_in_a_list(tmp_path: Path) -> None:
    forms: list[Any] = ["Once", ["Once"], [5, 6], [[5, 6]]]
    jobs, rejects = read(
        tmp_path, *(GOOD | {"prompt": form, "custom_id": str(n), "seed": 1} for n, form in enumerate(forms))
    )
    assert rejects == []
    assert [(job.prompt, job.prompt_ids) for job in jobs] == [("Once", None)] * 2 + [(None, (5, 6))] * 2
    again = [Job.model_validate_json(job.model_dump_json()) for job in jobs]
    assert again == jobs
    assert len({job.model_copy(update={"custom_id": "a"}).job_id("m") for job in jobs}) == 2


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], "found [], expected a string, or a list of token ids"),
    ([[]], "'prompt[0]': found [], expected"),
    ([""], "'prompt[0]': found \"\", expected a string with at least 1 character"),
    ([1, "a"], 'found "a" among its token ids'),
    ([1, -1], "found -1 among its token ids, expected whole numbers from 0 on"),
    ([1, 2.5], "found 2.5 among its token ids"),
    ([True], "found true among its token ids"),
    ([[1], 2], "expected"),
    ({"a": 1}, 'found {"a": 1}, expected a string'),
    (7, "found 7, expected a string"),
]


@pytest.mark.parametrize(("prompt", "words"), BAD_PROMPTS)
def test_a_prompt_of_another_form_is_refused(tmp_path: Path, prompt: Any, words: str) -> None:
    _, (reject, other) = read(tmp_path, GOOD | {"prompt": prompt}, batch({"prompt": prompt}))
    assert words in reject.reason
    assert "field 'prompt" in reject.reason
    assert "field 'body.prompt" in other.reason


def message(**fields: Any) -> dict[str, Any]:
    return CHAT | {"messages": [{"role": "user", "content": "Hello"} | fields]}


def test_a_content_is_a_text_or_text_parts_and_null_is_none_of_the_assistant(tmp_path: Path) -> None:
    text = {"type": "text", "text": "Hello"}
    contents: list[Any] = ["Hello", [text], ["Hello"], [text, {"type": "text", "text": "you"}]]
    jobs, rejects = read(tmp_path, *(message(content=each) | {"custom_id": str(n)} for n, each in enumerate(contents)))
    assert rejects == []
    found = [job.messages[0] for job in jobs if job.messages]
    assert found[:3] == [Message(role="user", content="Hello")] * 3
    assert found[3] == Message(role="user", content="Hello\nyou", parts=("Hello", "you"))
    assert [Job.model_validate_json(job.model_dump_json()) for job in jobs] == jobs
    (job,), rejects = read(tmp_path, message(role="assistant", content=None, tool_calls=[], refusal=None))
    assert (job.messages, rejects) == ((Message(role="assistant", content=""),), [])


def test_a_call_is_kept_in_one_form_and_needs_no_content(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = [
        {"content": None, "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": each}}]}
        for each in ('{"b":1, "a": "\u00e9"}', {"b": 1, "a": "\u00e9"})
    ]
    given.append({name: value for name, value in given[0].items() if name != "content"})
    lines = [CHAT | {"custom_id": str(n), "messages": [{"role": "assistant"} | each]} for n, each in enumerate(given)]
    jobs, rejects = read(tmp_path, *lines, message(role="tool", tool_call_id="a"))
    assert rejects == []
    assert [Job.model_validate_json(job.model_dump_json()) for job in jobs] == jobs
    *callers, answer = [job.messages[0] for job in jobs if job.messages]
    assert [each.as_sent() for each in callers] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"b": 1, "a": "\u00e9"}'}}],
        }
    ] * 3
    assert answer.tool_call_id == "a"


def test_a_call_without_arguments_has_none(tmp_path: Path) -> None:
    calls = [{"function": {"name": "f"} | each} for each in ({}, {"arguments": ""}, {"arguments": "{}"})]
    (job,), _ = read(tmp_path, message(role="assistant", tool_calls=calls))
    assert [call.function.arguments for call in job.messages[0].tool_calls] == ["{}"] * 3


BAD_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"content": None}, "'messages[0].content': found null, expected a string"),
    ({"content": []}, "'messages[0].content': found an empty list, expected"),
    ({"content": [{"type": "text"}]}, "'messages[0].content[0].text': found null, expected a string"),
    ({"content": [5]}, "'messages[0].content[0]': found 5, expected a text part"),
    (
        {"content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]},
        "'messages[0].content[1]': found a part of type \"image_url\", not supported; expected text parts",
    ),
    *(
        ({"content": [{"type": kind}]}, f'found a part of type "{kind}", not supported')
        for kind in ("input_audio", "file", "video_url", "refusal")
    ),
    *(
        ({name: "x"}, f"'messages[0].{name}': found \"x\", not supported")
        for name in ("function_call", "audio", "refusal")
    ),
    ({"tool_calls": "x"}, "'messages[0].tool_calls': found \"x\", expected a list of calls"),
    ({"tool_calls": [{"id": "a"}]}, "'messages[0].tool_calls[0].function': found nothing, expected a value"),
    ({"tool_calls": [{"function": {"name": "f"}, "type": "custom"}]}, "'messages[0].tool_calls[0].type': found"),
    *(
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": value}}]},
            "'messages[0].tool_calls[0].function.arguments': found",
        )
        for value in ("{", "[]", "5", 5, [], '{"a": NaN}')
    ),
    ({"tool_call_id": 5}, "'messages[0].tool_call_id': found 5, expected a string"),
    ({"name": 5}, "'messages[0].name': found 5, expected a string"),
    ({"reasoning_content": 5}, "'messages[0].reasoning_content': found 5, expected a string"),
]


@pytest.mark.parametrize(("fields", "words"), BAD_MESSAGES)
def test_a_message_that_is_no_text_is_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    _, (reject,) = read(tmp_path, message(**fields))
    assert words in reject.reason


def test_the_thought_of_a_message_is_kept_under_either_of_its_names(tmp_path: Path) -> None:
    thoughts: list[dict[str, Any]] = [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"reasoning": "hm", "reasoning_content": "hm"},
        {"reasoning": "hm", "reasoning_content": None},
    ]
    jobs, rejects = read(tmp_path, *(message(**each) | {"custom_id": str(n)} for n, each in enumerate(thoughts)))
    assert rejects == []
    assert [job.messages for job in jobs] == [(Message(role="user", content="Hello", reasoning_content="hm"),)] * 4
    assert [Job.model_validate_json(job.model_dump_json()) for job in jobs] == jobs
    (job,), rejects = read(tmp_path, message(reasoning="", reasoning_content=None))
    assert (job.messages, rejects) == ((Message(role="user", content="Hello"),), [])
    _, (reject,) = read(tmp_path, message(reasoning="hm", reasoning_content="oh"))
    assert "'messages[0].reasoning': found it and another reasoning_content, expected one of them" in reject.reason


def test_what_a_template_is_told_is_kept_with_the_job(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = [
        {},
        {"chat_template_kwargs": {}, "add_generation_prompt": True, "continue_final_message": False},
        {"chat_template_kwargs": {"enable_thinking": False, "level": 1, "bias": 0.5, "none": None}},
        {"reasoning_effort": "low"},
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}},
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"add_generation_prompt": False},
    ]
    jobs, rejects = read(tmp_path, *(CHAT | fields | {"custom_id": str(n), "seed": 1} for n, fields in enumerate(told)))
    assert rejects == []
    assert [job.template for job in jobs] == [
        *(None, None),
        TemplateOptions(kwargs={"enable_thinking": False, "level": 1, "bias": 0.5, "none": None}),
        *[TemplateOptions(kwargs={"reasoning_effort": "low"})] * 2,
        *[TemplateOptions(add_generation_prompt=False, continue_final_message=True)] * 2,
        TemplateOptions(add_generation_prompt=False),
    ]
    assert [Job.model_validate_json(job.model_dump_json()) for job in jobs] == jobs
    assert len({job.model_copy(update={"custom_id": "a"}).job_id("m") for job in jobs}) == 5


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"continue_final_message": True, "add_generation_prompt": True}, "found true for both, expected at most one"),
    ({"chat_template_kwargs": []}, "'chat_template_kwargs': found [], expected an object"),
    ({"chat_template_kwargs": {"a": {}}}, "'chat_template_kwargs': found {} as \"a\", expected strings, numbers"),
    (
        {"chat_template_kwargs": {"a": float("nan")}},
        "'chat_template_kwargs': found NaN as \"a\", expected strings, numbers",
    ),
    ({"chat_template_kwargs": {"a": "\ud800"}}, '\'chat_template_kwargs\': found "\\ud800" as "a", expected'),
    ({"chat_template_kwargs": {"tokenize": True}}, "'chat_template_kwargs': found \"tokenize\", expected variables"),
    ({"chat_template_kwargs": {"tools": "x"}}, "'chat_template_kwargs': found \"tools\", expected variables"),
    ({"reasoning_effort": 5}, "'reasoning_effort': found 5, expected a string"),
    (
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        "'reasoning_effort': found \"low\", and another in chat_template_kwargs; expected one of them",
    ),
    ({"best_of": 2}, "'best_of': found 2, not supported; expected 1, as many as n"),
]


@pytest.mark.parametrize(("fields", "words"), BAD_OPTIONS)
def test_options_that_no_template_can_follow_are_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    _, (short, long) = read(
        tmp_path, CHAT | fields, batch({"messages": CHAT["messages"], **fields}, "/v1/chat/completions")
    )
    assert words in short.reason
    assert (
        words.replace("'chat", "'body.chat").replace("'reas", "'body.reas").replace("'best", "'body.best")
        in long.reason
    )


def test_a_prompt_with_options_of_a_template_is_refused(tmp_path: Path) -> None:
    _, (short, long) = read(
        tmp_path, GOOD | {"reasoning_effort": "low"}, batch({"prompt": "a", "reasoning_effort": "a"})
    )
    assert "'reasoning_effort': found it with a prompt" in short.reason
    assert 'unknown field "body.reasoning_effort"' in long.reason


def test_no_template_variable_can_be_an_argument_of_what_renders_it() -> None:
    arguments = inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters
    assert arguments.keys() - {"self", "kwargs"} <= NOT_KWARGS
