"""The real `openai` client sends every field of other programs, and reads what they ask for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.serve.server_parts import Server, serving
from tests.scheduler.serve.test_served_tools import TEMPLATE, WEATHER

pytestmark = pytest.mark.ray

PROMPT, LONG = "the quick brown fox", "the quick brown fox jumps over the lazy dog. " * 3
GREEDY = {"temperature": 0, "max_tokens": 4}
SCHEMA = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "ids": {"prompt": [5, 6, 7], "return_token_ids": True} | GREEDY,
    "other_ids": {"prompt_token_ids": [5, 6, 7], "return_token_ids": True} | GREEDY,
    "plain": {"prompt": PROMPT, "logprobs": 1} | GREEDY,
    "echo": {"prompt": PROMPT, "logprobs": 1, "echo": True} | GREEDY,
    "alone": {"prompt": [PROMPT, "the lazy"], "logprobs": 1, "echo": True, "temperature": 0, "max_tokens": 0},
    "scored": {"prompt": PROMPT, "prompt_logprobs": 0, "n": 2} | GREEDY,
    "cut": {"prompt": LONG, "truncate_prompt_tokens": 2, "return_token_ids": True} | GREEDY,
    "fits": {"prompt": LONG * 200, "truncate_prompt_tokens": -1} | GREEDY,
    "open": {"prompt": PROMPT, "max_tokens": -1, "stop": "", "stop_token_ids": list(range(20, 84))},
    "lenient": {"prompt": PROMPT, "max_tokens": 30, "structured_outputs": {"json": SCHEMA}},
    "zero": {"prompt": PROMPT, "max_tokens": 0},
    "many": {"prompt": PROMPT, "prompt_logprobs": 21},
    "word": {"prompt": PROMPT, "echo": "yes"},
    "colour": {"prompt": PROMPT, "colour": 1},
    "suffix": {"prompt": PROMPT, "suffix": "x"},
    "long": {"prompt": PROMPT, "max_tokens": 10**6},
    "none": {"max_tokens": 5},
}
ASKED = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 300}
CHATS: dict[str, dict[str, Any]] = {
    "no": ASKED | {"tools": [WEATHER], "tool_choice": "none"},
    "auto": ASKED | {"tools": [WEATHER], "tool_choice": "auto"},
    "must": ASKED | {"tools": [WEATHER], "tool_choice": "required"},
    "named": ASKED | {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    "scored": ASKED | {"tools": [WEATHER], "prompt_logprobs": 1, "return_token_ids": True},
    "echo": ASKED | {"echo": True},
    "unknown": ASKED | {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
}
CODES = {
    **dict.fromkeys(["zero", "many"], "invalid_value"),
    **{"word": "invalid_type", "colour": "unknown_parameter", "suffix": "unsupported_parameter"},
    **{"long": "context_length_exceeded", "none": "missing_required_parameter"},
}

Results = tuple[dict[str, Any], dict[str, str]]
"""Bodies, and codes of errors."""


def results(server: Server, url: Any, bodies: dict[str, dict[str, Any]]) -> Results:
    lines = [
        {"custom_id": name, "method": "POST", "url": url, "body": {"model": "m"} | body}
        for name, body in bodies.items()
    ]
    made = server.client.batches.create(input_file_id=server.upload(*lines), endpoint=url, completion_window="24h")
    ended = server.ended(made.id)
    good, bad = server.lines(ended.output_file_id), server.lines(ended.error_file_id)
    assert {line["custom_id"] for line in (*good, *bad)} == bodies.keys()
    found = {line["custom_id"]: line["response"]["body"] for line in good}
    return found, {line["custom_id"]: line["error"]["code"] for line in bad}


def test_all_fields_of_completions_and_chats(tmp_path: Path, tiny_model: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with serving(tmp_path / "runs", model, "--lenient-schemas") as server:
        check_completions(*results(server, "/v1/completions", COMPLETIONS))
        check_chats(*results(server, "/v1/chat/completions", CHATS))


def check_completions(found: dict[str, Any], codes: dict[str, str]) -> None:
    assert codes == CODES
    choice: Callable[[str], dict[str, Any]] = lambda name: found[name]["choices"][0]  # noqa: E731
    assert choice("ids")["prompt_token_ids"] == choice("other_ids")["prompt_token_ids"] == [5, 6, 7]
    assert choice("ids")["token_ids"] == choice("other_ids")["token_ids"]
    plain, echo = choice("plain"), choice("echo")
    assert echo["text"] == PROMPT + plain["text"]
    assert [each["text"] for each in found["alone"]["choices"]] == [PROMPT, "the lazy"]
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert echo["logprobs"][name] == choice("alone")["logprobs"][name] + plain["logprobs"][name]
    own = [next(iter(each.values()))["logprob"] for each in choice("scored")["prompt_logprobs"][1:]]
    assert own == choice("alone")["logprobs"]["token_logprobs"][1:]
    assert found["scored"]["choices"][1]["prompt_logprobs"] == choice("scored")["prompt_logprobs"]
    assert len(choice("cut")["prompt_token_ids"]) == 2
    assert found["fits"]["usage"]["prompt_tokens"] == 4096 - GREEDY["max_tokens"]
    assert choice("open")["finish_reason"] == "stop"
    assert len(json.loads(choice("lenient")["text"])) <= 2
    assert choice("lenient")["ignored_schema_keywords"] == ["uniqueItems"]


def check_chats(found: dict[str, Any], codes: dict[str, str]) -> None:
    from openai.types.chat import ChatCompletion

    assert codes == dict.fromkeys(["echo", "unknown"], "invalid_value")
    answers = {name: ChatCompletion.model_validate(body, strict=True).choices[0] for name, body in found.items()}
    assert [answers[name].message.tool_calls for name in ("no", "auto")] == [None, None]
    assert answers["must"].message.tool_calls
    assert len(answers["named"].message.tool_calls or ()) == 1
    scored = found["scored"]
    assert len(scored["prompt_logprobs"]) == len(scored["prompt_token_ids"]) == scored["usage"]["prompt_tokens"]
