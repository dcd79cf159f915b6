from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.input.reader import JobReader
from tests.jobs.input.job_lines import CHAT, GOOD, batch, read


def bad(path: str, value: Any, *words: str) -> tuple[Any, list[str]]:
    """Return a line whose field at `path` has this value, and words of its reject beside the path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return GOOD | value, [f"'{path}'", *words]


BAD_LINES: list[tuple[Any, list[str]]] = [
    (b"{broken", ["not JSON", "column"]),
    (b'{"custom_id": "\0"}', ["not JSON: Invalid control character at column 16, expected"]),
    (b"[1]", ["[1]", "expected a JSON object"]),
    (b"[" * 100_000, ["nested too deeply"]),
    (b'{"custom_id": "a", "prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}", ["thousands of digits"]),
    (b'{"custom_id": "a", "prompt": "x", "prompt": "y", "max_tokens": 1}', ['"prompt"', "twice"]),
    (b'{"custom_id": "a", "prompt": "\xff", "max_tokens": 1}', ["not UTF-8", "0xff", "byte 31"]),
    (b'{"custom_id": "a", "prompt": "\\ud800", "max_tokens": 1}', ["'prompt'", "UTF-8"]),
    (
        GOOD | {"temprature": 1},
        ['unknown field "temprature" (did you mean temperature?), expected one of: ', "max_tokens", "prompt"],
    ),
    (GOOD | {"\x1b[31m": 1}, ['unknown field "\\u001b[31m"']),
    ({"custom_id": "a", "max_tokens": 5}, ["'prompt' and 'messages'", "neither"]),
    (GOOD | CHAT, ["'prompt' and 'messages'", "both"]),
    bad("prompt", "", '""', "at least 1 character"),
    (CHAT | {"messages": []}, ["'messages'", "at least 1 item"]),
    (CHAT | {"messages": ["Hello"]}, ["'messages[0]'", '"Hello"', "an object"]),
    (CHAT | {"messages": [{"role": "user", "content": "x", "nmae": "y"}]}, ["messages[0].nmae", "role, content"]),
    (CHAT | {"messages": [{"role": "user"}]}, ["'messages[0].content'", "nothing"]),
    (CHAT | {"messages": [{"role": "user", "content": "\ud83d"}]}, ["'messages[0].content'", "UTF-8"]),
    (CHAT | {"messages": [{"role": "user", "content": [{"text": "\ud83d"}]}]}, ["'messages[0].content'", "UTF-8"]),
    (CHAT | {"messages": [{"role": "user", "content": "x", "name": "\ud83d"}]}, ["'messages[0].name'", "UTF-8"]),
    (CHAT | {"reasoning_effort": "\ud83d"}, ["'reasoning_effort'", "UTF-8"]),
    ({"url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 5}}, ["'custom_id'", "nothing"]),
    bad("custom_id", "", "at least 1 character"),
    bad("custom_id", "x" * 10_240, "at most 512 characters"),
    bad("max_tokens", -3, "found -3"),
    bad("max_tokens", "5", 'found "5"', "a whole number"),
    bad("max_tokens", True, "found true"),
    bad("max_tokens", 10**30, "less than or equal to"),
    bad("temperature", float("nan"), "NaN", "finite"),
    bad("temperature", float("inf"), "Infinity", "finite"),
    (b'{"custom_id": "a", "prompt": "x", "max_tokens": 1, "temperature": 1e999}', ["'temperature'", "finite"]),
    bad("temperature", 1e-40, "found 1e-40", "0 (greedy) or a value of at least 1e-30"),
    bad("repetition_penalty", 1e-300, "1e-300", "greater than or equal to"),
    bad("repetition_penalty", 1e300, "1e+300", "less than or equal to 1000000"),
    bad("temperature", "hot", '"hot"', "a number"),
    bad("temperature", -0.1, "found -0.1"),
    bad("top_p", -0.1, "greater than or equal to 0"),
    bad("min_p", 1.5, "less than or equal to 1"),
    bad("repetition_penalty", 0, "greater than or equal to"),
    bad("seed", -(2**63) - 1, "greater than or equal to -9223372036854775808"),
    bad("stop", ["x"] * 17, "at most 16 items, not 17"),
    bad("stop", 5, "found 5", "expected a string, or a list of up to 16 strings"),
    (batch({"prompt": "x", "stop": {}}), ["'body.stop'", "found {}", "a string, or a list of up to 16 strings"]),
    bad("stop_token_ids", 5, "found 5", "expected a list of up to 64 token ids"),
    bad("bad_words", "ship", 'found "ship"', "expected a list of up to 128 strings"),
    (CHAT | {"messages": "Hello"}, ["'messages'", 'found "Hello"', "expected a list of messages"]),
    (batch({"prompt": "x", "logit_bias": {"7": 101}}), ["'body.logit_bias.7'", "found 101", "from -100 to 100"]),
    bad("response_format", "json", 'found "json"', "an object with a type, one of: text, json_object"),
    bad("structured_outputs", 5, "found 5", "an object with one of: json, json_object, regex"),
    bad("n", "2", 'found "2"', "expected a whole number"),
    (GOOD | {"stop": ["x", 5]}, ["'stop[1]'", "found 5", "a string"]),
    bad("frequency_penalty", 2.1, "found 2.1", "less than or equal to 2"),
    bad("presence_penalty", -2.1, "found -2.1", "greater than or equal to -2"),
    bad("presence_penalty", "2", 'found "2"', "a number"),
    (
        GOOD | {"repetition_detection": {"max_pattern_size": 9}},
        ["'repetition_detection.min_count'", "found 0", "expected at least 2"],
    ),
    (
        GOOD | {"repetition_detection": {"max_pattern_size": 9, "min_pattern_size": 10, "min_count": 2}},
        ["'repetition_detection.min_pattern_size'", "found 10", "at most max_pattern_size, 9"],
    ),
    (
        batch({"prompt": "x", "repetition_detection": {"max_pattern_size": -1}}),
        ["'body.repetition_detection.max_pattern_size'", "found -1", "greater than or equal to 0"],
    ),
    (
        GOOD | {"repetition_detection": {"max_pattern_size": 4097, "min_count": 2}},
        ["'repetition_detection.max_pattern_size'", "found 4097", "less than or equal to 4096"],
    ),
    bad("repetition_detection.action", "restart", 'found "restart"', "'stop', 'rewind' or 'close'"),
    bad("repetition_detection.max_rewinds", 101, "found 101", "less than or equal to 100"),
    (
        GOOD | {"repetition_detection": {"max_ngram": 3}},
        ['"repetition_detection.max_ngram"', "max_pattern_size, min_pattern_size, min_count"],
    ),
    bad("repetition_detection", 4, "found 4", "an object"),
    bad("logprobs", True, "found true", "a whole number from 0 to 20"),
    bad("logprobs", 21, "found 21", "a whole number from 0 to 20"),
    bad("logprobs", -1, "found -1", "a whole number from 0 to 20"),
    bad("logprobs", 5.5, "found 5.5", "a whole number from 0 to 20"),
    bad("logprobs", "all", 'found "all"', "a whole number from 0 to 20"),
    bad("top_logprobs", 3, "found 3, which is for chats", "as logprobs"),
    (CHAT | {"logprobs": 3}, ["'logprobs'", "found 3", "true or false", "top_logprobs"]),
    (CHAT | {"top_logprobs": 3}, ["'top_logprobs'", "found 3, and logprobs is not true", "both or none"]),
    (CHAT | {"logprobs": False, "top_logprobs": 3}, ["'top_logprobs'", "logprobs is not true"]),
    (CHAT | {"logprobs": True, "top_logprobs": 21}, ["'top_logprobs'", "found 21", "less than or equal to 20"]),
    (CHAT | {"logprobs": True, "top_logprobs": True}, ["'top_logprobs'", "found true", "a whole number"]),
    (CHAT | {"echo": True}, ["'echo'", "found true, which is for completions; expected false, or no such field"]),
    bad("echo", "alone", 'found "alone"'),
    bad("max_tokens", 0, "found 0, expected a value greater than or equal to 1, or echo"),
    (
        batch({"prompt": "x", "prompt_logprobs": -1}),
        ["'body.prompt_logprobs'", "found -1", "greater than or equal to 0"],
    ),
    (batch({"prompt": "x", "prompt_logprobs": 21}), ["'body.prompt_logprobs'", "found 21", "less than or equal to 20"]),
    (batch({"prompt": "x", "logprobs": {}}), ["'body.logprobs'", "found {}", "a whole number from 0 to 20"]),
    (
        batch({"messages": CHAT["messages"], "logprobs": 2}, "/v1/chat/completions"),
        ["'body.logprobs'", "found 2", "true or false"],
    ),
    bad("logit_bias", [[1, 2]], "found [[1, 2]]", "an object of token ids"),
    bad("logit_bias", {"the": 1}, 'found "the" as a token', "its number"),
    bad("logit_bias", {"-1": 1}, 'found "-1" as a token'),
    bad("logit_bias", {"01": 1}, 'found "01" as a token'),
    bad("logit_bias", {"\x1b[31m": 1}, '"\\u001b[31m"'),
    (GOOD | {"logit_bias": {"7": 100.5}}, ["'logit_bias.7'", "found 100.5", "from -100 to 100"]),
    (GOOD | {"logit_bias": {"7": 10**400}}, ["'logit_bias.7'", "from -100 to 100"]),
    (GOOD | {"logit_bias": {"7": float("nan")}}, ["'logit_bias.7'", "found NaN", "from -100 to 100"]),
    (GOOD | {"logit_bias": {"7": True}}, ["'logit_bias.7'", "found true"]),
    bad("logit_bias", {str(i): 1 for i in range(10_001)}, "found 10001 tokens", "at most 10000"),
    bad("structured_outputs", {"xml": 1}, '"xml"', "json_object, regex, choice, grammar"),
    bad("structured_outputs.structural_tag", "a", "not supported"),
    *(
        (GOOD | {"structured_outputs": each}, [".disable_any_whitespace'", "found true", "for json and json_object"])
        for each in ({"disable_any_whitespace": True}, {"regex": "a", "disable_any_whitespace": True})
    ),
    (GOOD | {"structured_outputs": {"json": {}, "disable_any_whitespace": 1}}, ["found 1, expected true or false"]),
    (GOOD | {"structured_outputs": {"regex": "a", "json": {}}}, ["found json and regex", "one of them"]),
    bad("structured_outputs.regex", "", 'found ""'),
    (GOOD | {"structured_outputs": {"regex": "a" * 20_001}}, ["found 20001 characters", "at most 20000"]),
    bad("structured_outputs.regex", "\ud800", "UTF-8"),
    bad("structured_outputs.grammar", ["a"], 'found ["a"]', "a string"),
    bad("structured_outputs.choice", [], "found []", "of at least 1 text"),
    (GOOD | {"structured_outputs": {"choice": ["a", 3]}}, ["'structured_outputs.choice[1]'", "found 3", "a text"]),
    (
        GOOD | {"structured_outputs": {"choice": [""]}},
        ["'structured_outputs.choice[0]'", 'found ""', "a text with at least 1 character"],
    ),
    bad("structured_outputs.choice", ["😀" * 10_000], "found 120004 characters of JSON in ASCII", "at most 100000"),
    bad("custom_id", "😀" * 513, "... (513 characters)", "expected at most 512 characters"),
    bad("max_tokens", ["x"] * 99, "... (495 characters of JSON)", "a whole number"),
    bad("logit_bias", {"\u0667": 1}, 'found "\\u0667" as a token', "its number"),
    bad("structured_outputs.choice", [str(i) for i in range(2001)], "found 2001 texts", "at most 2000"),
    bad("structured_outputs.json", "{", "a JSON schema"),
    bad("structured_outputs.json", False, "found false", "an object"),
    bad("structured_outputs.choice", False, "found false"),
    bad("structured_outputs.json", {"const": "\ud83d"}, "UTF-8"),
    bad("structured_outputs.choice", ["\ud83d"], "UTF-8"),
    bad("structured_outputs.json", [1], "found [1]", "an object"),
    bad("structured_outputs.json", {"enum": ["a" * 200_000]}, "characters", "at most 200000"),
    (GOOD | {"structured_outputs": {"json": {"minimum": float("nan")}}}, ["'structured_outputs", "NaN"]),
    bad("structured_outputs.json_object", 1, "found 1"),
    bad("response_format.type", "xml", '"xml"', "text, json_object, json_schema"),
    (GOOD | {"response_format": {"type": "json_schema"}}, ["'response_format.json_schema'", "found null"]),
    (
        GOOD | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 3}}},
        ["'response_format.json_schema.schema'", "found 3", "an object"],
    ),
    (GOOD | {"response_format": {"type": "text", "schema": {}}}, ["'response_format.schema'", "no such field"]),
    (
        GOOD | {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        ["'response_format' and 'structured_outputs'", "found both"],
    ),
    (GOOD | {"response_format": {"type": "json_object"}, "min_tokens": 2}, ["'min_tokens'", "found 2", "structured"]),
    (GOOD | {"structured_outputs": {"regex": "a"}, "ignore_eos": True}, ["'ignore_eos'", "found true", "structured"]),
    bad("thinking_token_budget", -2, "found -2", "greater than or equal to 0"),
    bad("thinking_token_budget", 2**31, "found 2147483648", "less than or equal"),
    bad("thinking_token_budget", True, "found true", "a whole number"),
    bad("thinking_token_budget", 5.5, "found 5.5", "a whole number"),
    bad("thinking_token_budget", {"tokens": 5}, "a whole number"),
    bad("thinking_end", "open", 'found "open"', "'stop' or 'close'"),
    (GOOD | {"thinking_end": "close", "logprobs": 1}, ["'thinking_end'", "found 'close' with logprobs"]),
    (
        GOOD | {"logprobs": 1, "repetition_detection": {"max_pattern_size": 4, "min_count": 2, "action": "close"}},
        ["'repetition_detection.action'", "found 'close' with logprobs"],
    ),
    (GOOD | {"prompt_token_ids": [5]}, ["'prompt' and 'prompt_token_ids'", "found both", "one of them"]),
    (CHAT | {"prompt_token_ids": [5]}, ["'prompt_token_ids' and 'messages'", "found both"]),
    (batch({"prompt": "x", "prompt_token_ids": [5]}), ["'prompt' and 'prompt_token_ids'", "found both"]),
    *(
        (batch({"prompt_token_ids": each}), ["'body.prompt_token_ids'", "found ", "a list of token ids"])
        for each in ([], "x", 5, {})
    ),
    *(
        (batch({"prompt_token_ids": each}), ["'body.prompt_token_ids'", "among its token ids", "numbers from 0 on"])
        for each in ([5, "x"], [-1], [True], [2**31], [[5]])
    ),
    (
        batch({"messages": CHAT["messages"], "prompt_token_ids": [5]}, "/v1/chat/completions"),
        ['unknown field "body.prompt_token_ids"'],
    ),
    (batch({"max_tokens": 5, "prompt_token_ids": None}), ["'body.prompt'", "nothing"]),
    bad("extra_body", {"top_k": 5}, 'found {"top_k": 5}', "expected its fields beside the others"),
    (batch({"prompt": "x", "system": "Be kind."}), ["'body.system'", 'found "Be kind."', "a message of role system"]),
    bad("truncate_prompt_tokens", 0, "found 0", "at least 1 token, or -1"),
    bad("truncate_prompt_tokens", -2, "found -2", "greater than or equal to -1"),
    (CHAT | {"enable_thinking": False}, ["'enable_thinking'", "found false", "it in chat_template_kwargs"]),
    (
        {"custom_id": "a", "params": {"model": "m", "max_tokens": 5, "messages": CHAT["messages"]}},
        ["'params'", "this is a line of Anthropic's Message Batches, expected", "url and body", "messages"],
    ),
    (
        {"key": "a", "request": {"contents": [{"parts": [{"text": "Hello"}]}]}},
        ["'request'", "this is a line of Gemini's Batch API, expected"],
    ),
    *(
        (
            batch({"input": "x"}, url),
            ["'url'", f"this is a line of /v1/{name}, expected one of /v1/completions or /v1/"],
        )
        for url, name in (
            ("/v1/responses", "responses"),
            ("/v1/embeddings", "embeddings"),
            ("https://example.com/v1/embeddings/", "embeddings"),
        )
    ),
    bad("guided_regex", "a", "old name", "structured_outputs.regex"),
    bad("min_tokens", -1, "found -1", "greater than or equal to 0"),
    bad("min_tokens", 6, "found 6", "at most max_tokens, 5"),
    (GOOD | {"stop_token_ids": [3, "5"]}, ["'stop_token_ids[1]'", 'found "5"', "a whole number"]),
    (GOOD | {"stop_token_ids": [-5]}, ["'stop_token_ids[0]'", "found -5", "greater than or equal to 0"]),
    bad("stop_token_ids", list(range(65)), "at most 64 items, not 65"),
    bad("include_stop_str_in_output", 1, "found 1", "true or false"),
    (GOOD | {"bad_words": ["no", " "]}, ["'bad_words[1]'", 'found " "', "expected a text that is not blank"]),
    bad("bad_words", ["no"] * 129, "at most 128 items, not 129"),
    bad("ignore_eos", "yes", "true or false"),
    (batch(GOOD, custom_id=None), ["'custom_id'", "found null", "a string"]),
    (GOOD | {"prompt": None}, ["'prompt' and 'messages'", "neither"]),
    (GOOD | {"colour": None}, ['unknown field "colour"']),
    (json.dumps(GOOD).encode("utf-16"), ["not UTF-8", "0xff"]),
    (json.dumps(GOOD).encode("utf-16-be"), ["not JSON"]),
    (b"\0" + json.dumps(GOOD).encode(), ["not JSON"]),
    (b'{"custom_id": "a", "prompt": "x", "max_tokens": 1, "body": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001, ["deeply"]),
    (b'{"custom_id": "a", "prompt": "x", "max_tokens": 1e300}', ["'max_tokens'", "less than or equal to"]),
    (b'{"custom_id": "a", "prompt": "x", "max_tokens": 1e999}', ["'max_tokens'", "a whole number"]),
    (b'{"custom_id": "a", "prompt": "x", "max_tokens": 1, "temperature": NaN}', ["'temperature'", "finite"]),
    bad("seed", 2**64, "less than or equal to 18446744073709551615"),
    (batch({"prompt": "x", "max_tokens": 1}, method="GET"), ["'method'", '"GET"', "'POST'"]),
    (batch({"prompt": "x"}, "/v2/completions"), ["'url'", "/v2/completions", "/v1/completions"]),
    (batch({"prompt": "x"}, None), ["'url'", "found null", "/v1/completions"]),
    bad("custom_id", 7.5, "found 7.5", "a string"),
    bad("custom_id", True, "found true", "a string"),
    (GOOD | {"body": {}}, ["'url'", 'unknown field "prompt"']),
    (batch({"prompt": "x", "priority": 0.5}), ["'body.priority'", "found 0.5"]),
    (batch({"prompt": "x", "n": 0}), ["'body.n'", "found 0", "greater than or equal to 1"]),
    (batch({"prompt": "x", "n": 129}), ["'body.n'", "found 129", "less than or equal to 128"]),
    (batch({"prompt": "x", "n": 2.5}), ["'body.n'", "found 2.5", "a whole number"]),
    (batch({"prompt": ["x"] * 2049}), ["'body.prompt'", "found 2049 prompts", "at most 2048"]),
    (
        batch({"prompt": ["x"] * 17, "n": 128}),
        ["'prompt' and 'n'", "found 17 prompts with 128 choices", "at most 2048"],
    ),
    (batch({"prompt": "x", "n": 2, "best_of": 3}), ["'body.best_of'", "found 3, not supported", "expected 2"]),
    (batch({"prompt": "x", "max_tokens": 1, "model": 5}), ["'body.model'", "found 5", "a string"]),
    (batch({"messages": CHAT["messages"], "max_tokens": 5}), ['unknown field "body.messages"', "prompt"]),
    (
        batch({"messages": CHAT["messages"], "max_tokens": 5, "max_completion_tokens": 6}, "/v1/chat/completions"),
        ["'max_tokens' and 'max_completion_tokens'", "found two limits"],
    ),
]


@pytest.mark.parametrize(("line", "words"), BAD_LINES, ids=["-".join(words) for _, words in BAD_LINES])
def test_a_bad_line_is_a_reject_with_its_number_and_reason_and_the_others_are_read(
    tmp_path: Path, line: Any, words: list[str]
) -> None:
    jobs, rejects = read(tmp_path, GOOD | {"custom_id": "before"}, line, GOOD | {"custom_id": "after"})
    assert [job.custom_id for job in jobs] == ["before", "after"]
    (reject,) = rejects
    assert reject.line_number == 2
    assert "expected" in reject.reason
    assert "\n" not in reject.reason
    assert [word for word in words if word not in reject.reason] == []


CODES: list[tuple[Any, str]] = [
    (b"{torn", "invalid_json_line"),
    (b"[1]", "invalid_json_line"),
    (b"[" * 100_000, "invalid_json_line"),
    (b'{"custom_id": "a", "prompt": "\xff"}', "invalid_json_line"),
    (b'{"custom_id": "a", "prompt": "x", "prompt": "y"}', "invalid_json_line"),
    (GOOD | {"custom_id": "before"}, "duplicate_custom_id"),
    (batch({"prompt": "x"}, custom_id=None), "invalid_type"),
    ({"custom_id": "a"}, "missing_required_parameter"),
    (batch({"max_tokens": 5}), "missing_required_parameter"),
    (GOOD | {"colour": 5}, "unknown_parameter"),
    ({"custom_id": "a", "params": {}}, "unknown_parameter"),
    (GOOD | {"watermarking": True}, "unsupported_parameter"),
    (GOOD | {"temperature": "hot"}, "invalid_type"),
    (GOOD | {"temperature": -1}, "invalid_value"),
    (GOOD | {"logit_bias": {"a": 1}}, "invalid_value"),
    (GOOD | CHAT, "invalid_value"),
    (batch({"input": "x"}, "/v1/embeddings"), "invalid_url"),
]


@pytest.mark.parametrize(("line", "code"), CODES)
def test_a_reject_has_openai_s_code(tmp_path: Path, line: Any, code: str) -> None:
    _, [reject] = read(tmp_path, GOOD | {"custom_id": "before"}, line)
    assert reject.code == code


def test_a_line_for_another_endpoint_than_the_asked_one_has_a_code_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text(json.dumps(GOOD))
    reader = JobReader(1, endpoint="/v1/chat/completions")
    assert list(reader.lines(str(path), "jobs.jsonl")) == []
    assert [reject.code for reject in reader.rejects] == ["url_mismatch"]


def test_a_reject_keeps_the_custom_id_that_could_be_read(tmp_path: Path) -> None:
    bad = [
        GOOD | {"max_tokens": 0},
        GOOD | {"custom_id": "x" * 10_240},
        GOOD | {"custom_id": 7, "max_tokens": 0},
        b'{"custom_id": "\\ud800"}',
    ]
    _, rejects = read(tmp_path, *bad)
    assert [reject.custom_id for reject in rejects] == ["good", None, "7", None]


def test_a_line_with_many_unknown_fields_gives_a_short_reason(tmp_path: Path) -> None:
    _, (reject,) = read(tmp_path, GOOD | {f"field{number}": 1 for number in range(1000)})
    assert "and 995 more" in reject.reason
    assert len(reject.reason) < 2000
