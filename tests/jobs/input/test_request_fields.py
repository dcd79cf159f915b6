"""Every field of OpenAI and vLLM is used, ignored or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.input.request_fields import ShortLine, is_of_others
from swiftbatch.jobs.sampling_params import SamplingParams
from tests.jobs.input.job_lines import CHAT, batch, read_lines

COMPLETION = {"prompt": "Once", "max_tokens": 5}
CHATTING = {"messages": CHAT["messages"], "max_tokens": 5}
BODIES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHATTING}
BOTH = tuple(BODIES)
ONE, CHATS = BOTH[:1], BOTH[1:]

FORMATS: list[Any] = [
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True}},
    None,
    {"type": "json_object", "disable_any_whitespace": True},
]
STRUCTURES: list[Any] = [
    *({"json": each} for each in ({"type": "integer"}, '{"type": "integer"}', {})),
    *({"regex": "a+"}, {"choice": ["a", "b"]}, {"grammar": 'root ::= "a"'}, {"json_object": True}),
    *({}, None, {"json": None, "regex": "a", "json_object": False, "disable_fallback": False}),
    *({"json": {}, "disable_any_whitespace": value} for value in (True, False, None)),
]

TAKEN: list[tuple[tuple[str, ...], str, Any]] = [
    *((BOTH, "max_tokens", value) for value in (7, None, -1)),
    *((BOTH, "max_completion_tokens", value) for value in (5, None, -1, -1.0)),
    *((BOTH, name, 0.5) for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
    *((BOTH, "top_k", value) for value in (0, 5, -1)),
    *((BOTH, "seed", value) for value in (5, None)),
    *((BOTH, "stop", value) for value in ("a", ["a", "b"], "", [""], None)),
    *((BOTH, "ignore_eos", value) for value in (True, False)),
    *((BOTH, "n", value) for value in (1, 3, 128, None)),
    *((BOTH, "best_of", value) for value in (1, None)),
    *((BOTH, "priority", value) for value in (0, -7, 2**63 - 1, None)),
    (BOTH, "model", "some-model"),
    *((BOTH, "response_format", value) for value in FORMATS),
    *((BOTH, "structured_outputs", value) for value in STRUCTURES),
    *((BOTH, "thinking_token_budget", value) for value in (0, 5, -1, None)),
    *((BOTH, name, value) for name in ("stop_in_reasoning", "return_token_ids") for value in (True, False, None)),
    *((ONE, "prompt", value) for value in ("a", [1, 2], ["a", "b"], [[1, 2], [3]])),
    *((ONE, "logprobs", value) for value in (5, 0, False, None)),
    *((CHATS, "logprobs", value) for value in (True, False, 0, None)),
    *((BOTH, "top_logprobs", value) for value in (0, False, None)),
    *((BOTH, "truncate_prompt_tokens", value) for value in (5, 1, -1, None)),
    (CHATS, "chat_template_kwargs", {"enable_thinking": False}),
    (CHATS, "reasoning_effort", "low"),
    *((CHATS, "add_generation_prompt", value) for value in (True, False)),
    *((CHATS, "continue_final_message", value) for value in (True, False)),
    *((CHATS, "tools", value) for value in ([{"type": "function", "function": {"name": "a"}}], [], None)),
    *((BOTH, "tool_choice", value) for value in ("none", "auto", None)),
    (ONE, "tools", []),
]
WITHOUT_EFFECT: list[tuple[str, Any]] = [
    ("user", "somebody"),
    ("store", True),
    ("service_tier", "flex"),
    ("stream", True),
    ("stream_options", {"include_usage": True}),
    ("parallel_tool_calls", True),
    ("prompt_cache_key", "a"),
    ("prompt_cache_retention", "24h"),
    ("safety_identifier", "a"),
    ("prediction", {"type": "content", "content": "a"}),
    ("request_id", "a"),
    ("session_id", "a"),
    ("cache_salt", "a"),
    ("stream_interval", 2),
    ("kv_transfer_params", {"a": 1}),
    ("ec_transfer_params", {"a": 1}),
    ("return_mm_kwargs", True),
    ("return_tokens_as_token_ids", True),
    ("return_token_offsets", True),
    ("routed_experts_prompt_start", 3),
    ("truncation_side", "left"),
    ("guided_decoding_backend", "a"),
    ("guided_whitespace_pattern", "a"),
    ("prompt_cache_options", {"mode": "explicit"}),
    ("return_assistant_tokens_mask", True),
    ("spaces_between_special_tokens", True),
]
REFUSED: list[tuple[str, Any, Any]] = [  # with a value that asks for nothing
    ("functions", [{"name": "a"}], []),
    ("function_call", {"name": "a"}, "auto"),
    ("audio", {"voice": "a"}, None),
    ("modalities", ["text", "audio"], ["text"]),
    ("moderation", {"model": "a"}, None),
    ("web_search_options", {}, None),
    ("verbosity", "low", "medium"),
    ("guided_json", {}, None),
    ("guided_regex", "a", None),
    ("guided_choice", ["a"], None),
    ("guided_grammar", "a", None),
    ("structural_tag", "a", None),
    ("logprob_token_ids", [1], []),
    ("suffix", "a", ""),
    ("use_beam_search", True, False),
    ("length_penalty", 1.5, 1.0),
    ("early_stopping", True, False),
    ("watermarking", True, False),
    ("skip_special_tokens", False, True),
    ("allowed_token_ids", [1], None),
    ("logits_processors", ["a"], []),
    ("include_reasoning", False, True),
    ("return_prompt_text", True, False),
    ("prompt_embeds", "a", None),
    ("documents", [{"title": "a"}], []),
    ("chat_template", "{{ messages }}", None),
    ("media_io_kwargs", {"image": {}}, {}),
    ("mm_processor_kwargs", {"a": 1}, {}),
    ("vllm_xargs", {"a": 1}, {}),
    ("extra_body", {"top_k": 5}, {}),
    ("enable_thinking", True, None),
    ("system", "Be kind.", ""),
]


def test_every_field_of_openai_s_client_is_known() -> None:
    from openai.types import chat, completion_create_params

    forms = (
        chat.completion_create_params.CompletionCreateParamsBase,
        completion_create_params.CompletionCreateParamsBase,
    )
    names = [name for form in forms for name in form.__annotations__]
    assert len(names) > 30
    assert [name for name in names if name not in ShortLine.model_fields and not is_of_others(name)] == []


def lines_with(name: str, value: Any, urls: tuple[str, ...] = BOTH) -> list[dict[str, Any]]:
    return [batch(BODIES[url] | {name: value}, url, custom_id=url) for url in urls]


@pytest.mark.parametrize(("urls", "name", "value"), TAKEN)
def test_a_field_with_a_meaning_here_is_taken(tmp_path: Path, urls: tuple[str, ...], name: str, value: Any) -> None:
    lines, rejects = read_lines(tmp_path, *lines_with(name, value, urls))
    assert rejects == []
    assert [line.without_effect for line in lines] == [()] * len(urls)


def test_all_sampling_fields_are_taken_in_all_forms_with_their_defaults(tmp_path: Path) -> None:
    fields = SamplingParams(max_tokens=5, seed=1).model_dump(mode="json")
    short = [CHAT | fields, {"custom_id": "a", "prompt": "x"} | fields]
    lines, rejects = read_lines(
        tmp_path, *short, *(batch(body | fields, url, custom_id=url) for url, body in BODIES.items())
    )
    assert (len(lines), rejects) == (4, [])


@pytest.mark.parametrize(("name", "value"), WITHOUT_EFFECT)
def test_a_field_without_a_meaning_here_is_read_and_named(tmp_path: Path, name: str, value: Any) -> None:
    lines, rejects = read_lines(tmp_path, *lines_with(name, value), CHAT | {name: value})
    assert rejects == []
    assert [line.without_effect for line in lines] == [(name,)] * 3
    plain, _ = read_lines(tmp_path, *lines_with("model", "m"))
    assert [line.jobs([5]) for line in lines[:2]] == [line.jobs([5]) for line in plain]


def test_a_field_that_asks_for_nothing_is_not_told_of(tmp_path: Path) -> None:
    quiet = {"stream": False, "store": False, "user": None, "metadata": None}
    (line,), rejects = read_lines(tmp_path, CHAT | quiet)
    assert (line.without_effect, rejects) == ((), [])


@pytest.mark.parametrize(("name", "value", "neutral"), REFUSED, ids=[f"{name}-{value}" for name, value, _ in REFUSED])
def test_what_is_not_supported_is_refused_by_its_name_and_taken_where_it_asks_for_nothing(
    tmp_path: Path, name: str, value: Any, neutral: Any
) -> None:
    lines, rejects = read_lines(tmp_path, *lines_with(name, value), CHAT | {name: value})
    assert lines == []
    assert len(rejects) == 3
    for reject, place in zip(rejects, (f"body.{name}", f"body.{name}", name), strict=True):
        assert reject.reason.startswith(f"field '{place}': found ")
        assert "not supported" in reject.reason
        assert "expected " in reject.reason
    lines, rejects = read_lines(tmp_path, *lines_with(name, neutral))
    assert rejects == []
    assert [line.without_effect for line in lines] == [(), ()]


@pytest.mark.parametrize("url", BOTH)
def test_a_limit_of_minus_one_is_none_and_an_empty_stop_text_is_no_stop_text(tmp_path: Path, url: str) -> None:
    empty = {"max_tokens": -1, "max_completion_tokens": -1, "stop": ["", "END", ""]}
    [line, plain], rejects = read_lines(
        tmp_path,
        batch(BODIES[url] | empty, url, custom_id="a"),
        batch(BODIES[url] | {"max_tokens": None, "stop": ""}, url, custom_id="b"),
    )
    assert rejects == []
    assert (line.max_tokens, line.sampling["stop"]) == (None, ("END",))
    assert (plain.max_tokens, plain.sampling["stop"]) == (None, ())


def test_token_ids_may_come_in_a_field_of_their_own(tmp_path: Path) -> None:
    ids = {"prompt_token_ids": [5, 6.0, 7], "max_tokens": 5}
    fields = [{"custom_id": "a"} | ids, {"custom_id": "b"} | ids | {"prompt": None}, batch(ids, custom_id="c")]
    lines, rejects = read_lines(tmp_path, *fields, batch({"prompt": [5, 6, 7], "max_tokens": 5}, custom_id="c2"))
    assert rejects == []
    assert [line.prompts for line in lines] == [((5, 6, 7),)] * 4
    made = [line.jobs([5])[0].model_copy(update={"custom_id": "a", "sampling": None}) for line in lines]
    assert made == [made[0]] * 4


def test_a_line_with_token_ids_does_not_let_a_later_one_have_a_text_beside_them(tmp_path: Path) -> None:
    first = {"custom_id": "a", "prompt": None, "prompt_token_ids": [5]}
    lines, [reject] = read_lines(tmp_path, first, first | {"custom_id": "b", "prompt": "Once"})
    assert ([line.custom_id for line in lines], reject.custom_id) == (["a"], "b")


def test_special_tokens_are_added_to_texts_and_not_behind_templates(tmp_path: Path) -> None:
    for value, taken in ((True, "/v1/completions"), (False, "/v1/chat/completions")):
        lines, (reject,) = read_lines(tmp_path, *lines_with("add_special_tokens", value))
        assert [line.custom_id for line in lines] == [taken]
        assert "not supported" in reject.reason


def test_all_that_is_not_supported_is_named_at_once(tmp_path: Path) -> None:
    _, (reject,) = read_lines(tmp_path, CHAT | {"functions": [1], "watermarking": True, "user": "a"})
    assert "field 'functions': found [1], not supported" in reject.reason
    assert "field 'watermarking': found true, not supported; expected false, or no such field" in reject.reason


# lines in the shapes of batch guides, with our own models and texts
EXAMPLES = [
    batch(
        {
            "model": "any-small-model",
            "messages": [
                {"role": "system", "content": "You answer in one line."},
                {"role": "user", "content": "Which river is the longest?"},
            ],
            "max_tokens": 1000,
        },
        "/v1/chat/completions",
        custom_id="request-1",
    ),
    batch(
        {
            "model": "org/a-model",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
            "max_completion_tokens": 500,
            "temperature": 0.0,
        },
        "/v1/chat/completions",
        custom_id="request-2",
    ),
    batch({"model": "org/a-model", "prompt": "Rivers are", "max_tokens": 64, "n": 1}, custom_id="request-3"),
]


def test_urls_without_a_version_are_those_with_one(tmp_path: Path) -> None:
    lines, rejects = read_lines(
        tmp_path, *(batch(body, url.removeprefix("/v1"), custom_id=url) for url, body in BODIES.items())
    )
    assert rejects == []
    assert [line.jobs([5])[0].url for line in lines] == list(BODIES)


def test_lines_as_batch_guides_show_them_are_taken(tmp_path: Path) -> None:
    lines, rejects = read_lines(tmp_path, *EXAMPLES)
    assert [line.custom_id for line in lines] == ["request-1", "request-2", "request-3"]
    assert [line.max_tokens for line in lines] == [1000, 500, 64]
    assert rejects == []


def test_compact_json_may_be_asked_for_beside_a_format(tmp_path: Path) -> None:
    compact, others = {"disable_any_whitespace": True}, [{"type": "json_object"}, {"type": "text"}]
    asked = [{"response_format": each, "structured_outputs": compact} for each in others]
    asked += [{"structured_outputs": {"json_object": True} | compact}, {"structured_outputs": compact}]
    lines, rejects = read_lines(
        tmp_path, *(batch(COMPLETION | each, custom_id=str(number)) for number, each in enumerate(asked))
    )
    assert [line.custom_id for line in lines] == ["0", "2"]
    assert lines[0].sampling["structured_outputs"] == lines[1].sampling["structured_outputs"]
    assert ["found true" in reject.reason for reject in rejects] == [True, True]


def test_a_format_of_a_schema_that_no_text_has_to_have_is_told(tmp_path: Path) -> None:
    properties = {"format": {"type": "string", "format": "uuid4"}, "when": {"type": "string", "format": "date"}}
    schema = {"properties": properties, "items": [{"format": "path"}], "const": {"format": "none"}}
    formats = [
        ("response_format", {"type": "json_schema", "json_schema": {"schema": schema}}),
        ("structured_outputs", {"json": schema}),
    ]
    lines, rejects = read_lines(tmp_path, *(batch(COMPLETION | {name: each}, custom_id=name) for name, each in formats))
    assert rejects == []
    assert [line.without_effect for line in lines] == [('format "path"', 'format "uuid4"')] * 2
