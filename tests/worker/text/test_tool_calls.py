"""Every form of calls keeps one contract: found, left as text, and forced."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken

from swiftbatch.jobs.job import TemplateOptions
from swiftbatch.worker.constraints.grammar import GrammarTokenizer
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.sampling.token_masks import ConstraintError, tokens_of
from swiftbatch.worker.text.call_grammars import rule_of_calls
from swiftbatch.worker.text.output_text import ByteText
from swiftbatch.worker.text.token_bytes import TokenBytes, steps_of
from swiftbatch.worker.text.tokenizer import TextCodec
from swiftbatch.worker.text.tool_calls import FORMS, CallForm, calls_in, form_of

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: tuple[dict[str, Any], ...] = (
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
)
CALLED = [("weather", {"city": "Oslo {\n", "days": 3}), ("now", {})]
ARGUMENTS = json.dumps(CALLED[0][1])
SEP, END = "<\uff5ctool\u2581sep\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
ONE, ALL = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581begin\uff5c>"
OVER = ALL.replace("begin", "end")

# what a template of the family contains, and a text with CALLED in its form
FAMILIES: dict[str, tuple[str, str]] = {
    "gpt-oss": (
        "<|start|>assistant to= functions. <|channel|>commentary <tool_call>",
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
    ),
    "GLM": (
        "<tool_call>{{ name }}<arg_key>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo {\n</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    ),
    "Qwen3-Coder": (
        "<tool_call>\n<function={{ name }}>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo {\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "DeepSeek-V3, R1": (
        f"{ONE}{{{{ type }}}}{SEP}{{{{ name }}}}\n```json\n",
        f"{ALL}{ONE}function{SEP}weather\n```json\n{ARGUMENTS}\n```{END}\n{ONE}function{SEP}now\n```json\n{{}}\n```{END}"
        f"{OVER}",
    ),
    "DeepSeek-V3.1": (
        f"{ONE}{{{{ name }}}}{SEP}",
        f"{ALL}{ONE}weather{SEP}{ARGUMENTS}{END}{ONE}now{SEP}{{}}{END}{OVER}",
    ),
    "Mistral, from 2025 on": (
        "[TOOL_CALLS]{{ name }}[ARGS]",
        f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}",
    ),
    "Mistral, until 2024": (
        "[TOOL_CALLS]",
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]',
    ),
    "Hermes, Qwen": (
        "<tool_call>\n",
        f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n<tool_call>\n'
        '{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "Llama 3": (
        'Respond in the format {"name": function name, "parameters": dictionary}',
        f'{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "now", "parameters": {{}}}}',
    ),
}


MARKS = {mark for form in FORMS for mark in form.marks}


def form(family: str) -> CallForm:
    [found] = [each for each in FORMS if each.family == family]
    return found


def called(found: Any) -> list[tuple[str, Any]]:
    functions = [each["function"] for each in found.tool_calls]
    return [(each["name"], json.loads(each["arguments"])) for each in functions]


@pytest.fixture(scope="module")
def tokenizer(embedded_files: ModelFiles) -> Any:
    """The embedded model's tokenizer, in which all marks are special tokens."""
    made = copy.deepcopy(TextCodec(embedded_files)._tokenizer)
    marks = dict.fromkeys(mark for each in FORMS for mark in each.marks)
    made.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks], special_tokens=True)
    return made


def forced(tokenizer: Any, family: str, **said: Any) -> Any:
    options = TemplateOptions(tools=TOOLS, must_call=True, **said)
    grammars = GrammarTokenizer(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    return rule_of_calls(form(family), options, tokenizer, grammars)


@pytest.mark.parametrize("family", FAMILIES)
class TestEveryForm:
    def test_is_found_by_its_template(self, tokenizer: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
        template, _ = FAMILIES[family]
        for templates in (template, {"default": "{{ messages }}", "tool_use": template}):
            monkeypatch.setattr(tokenizer, "chat_template", templates)
            assert form_of(tokenizer).family == family

    def test_has_its_calls_and_no_other_text(self, family: str) -> None:
        found = calls_in(form(family), FAMILIES[family][1], TOOLS, "job")
        assert (called(found), found.content, found.thought) == (CALLED, None, None)
        assert all(each["type"] == "function" for each in found.tool_calls)

    def test_ids_are_of_the_job_and_the_place(self, family: str) -> None:
        ids = [
            [each["id"] for each in found.tool_calls]
            for job_id in ("job", "job", "other")
            if (found := calls_in(form(family), FAMILIES[family][1], TOOLS, job_id)) is not None
        ]
        assert ids[0] == ids[1]
        assert len({*ids[0], *ids[2]}) == 4
        assert all(each.isalnum() and len(each) == 9 for each in ids[0])

    def test_other_text_stays_beside_calls(self, family: str) -> None:
        said = "Let me see."
        text = FAMILIES[family][1]
        if family == "gpt-oss":
            thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
            text = f"{thought}<|channel|>final<|message|>{said}<|end|>{text}"
        elif family == "Llama 3":
            text = f"{text}; {said}"
        else:
            text = f"{said}\n{text}"
        found = calls_in(form(family), text, TOOLS, "job")
        assert (called(found), found.thought) == (CALLED, "Hm." if family == "gpt-oss" else None)
        assert said in (found.content or "")

    def test_what_is_no_valid_call_stays_text(self, family: str) -> None:
        text = FAMILIES[family][1]
        unknown = (TOOLS[1] | {"function": {"name": "other"}},)
        assert calls_in(form(family), text, unknown, "job") is None
        assert calls_in(form(family), "Oslo is cold.", TOOLS, "job") is None
        for place in range(text.index("Oslo"), 0, -1):  # cut within the first call
            assert calls_in(form(family), text[:place], TOOLS, "job") is None
        if "{" in text.replace("Oslo {", ""):
            broken = (
                text.replace(ARGUMENTS, ARGUMENTS[:-1] + ', "days": NaN}').replace(": {}", ": 5").replace("{}", "5")
            )
            assert calls_in(form(family), broken, TOOLS, "job") is None

    def test_a_text_that_goes_in_circles_is_read_to_its_end(self, family: str) -> None:
        text, limit = FAMILIES[family][1], 100_000
        circles = [
            *("\n", " ", "{", "[", '"', ";", *form(family).marks),
            *(text[:place] for place in range(1, len(text), 11)),
            *(text[place:-1] for place in range(1, len(text) - 1, 31)),
        ]
        for circle in circles:  # a time in proportion to the square of the length would reach the test's timeout
            calls_in(form(family), text[:-1] + circle * (limit // len(circle)), TOOLS, "job")

    def test_marks_are_read_where_they_are_special_tokens(self, tokenizer: Any, family: str) -> None:
        steps = steps_of(tokenizer)
        ids = tokenizer.encode(FAMILIES[family][1], add_special_tokens=False)
        marked = ByteText(TokenBytes(tokenizer, steps, form(family).marks), steps).decode(ids)
        assert marked == FAMILIES[family][1]
        plain = ByteText(TokenBytes(tokenizer, steps), steps).decode(ids)
        assert not any(mark in plain for mark in form(family).marks)

    def test_calls_are_forced_or_refused_with_the_reason(self, tokenizer: Any, family: str) -> None:
        text = FAMILIES[family][1]
        if family == "gpt-oss":  # its texts have one call, perhaps behind a thought
            text = text.partition("<|call|>")[0]
        first, one = forced(tokenizer, family).matcher(), forced(tokenizer, family, function="weather").matcher()
        twice = text.replace("now", "weather")
        other = forced(tokenizer, family, function="now").matcher()
        ids, again = (tokenizer.encode(each, add_special_tokens=False) for each in (text, twice))
        assert is_whole(first, ids)
        assert is_whole(one, ids) == is_whole(one, again) == (family == "gpt-oss")
        assert is_whole(first, again)
        assert other.validate_tokens(ids) < len(ids)
        wrong = text.replace(": 3", ': "3"').replace(">3<", ">three<").replace("\n3\n", "\nthree\n")
        wrong_ids = tokenizer.encode(wrong, add_special_tokens=False)
        assert first.deep_copy().validate_tokens(wrong_ids) < len(wrong_ids)
        prose = tokenizer.encode("Oslo is cold.", add_special_tokens=False)
        assert first.validate_tokens(prose) == 0

    @pytest.mark.parametrize("have_tokens", [True, False])
    def test_what_is_forced_is_read_back(
        self, tokenizer: Any, embedded_files: ModelFiles, family: str, have_tokens: bool
    ) -> None:
        own = tokenizer if have_tokens else TextCodec(embedded_files)._tokenizer
        tools = ({"type": "function", "function": {"name": "f", "parameters": MANY}}, TOOLS[1])
        options = TemplateOptions(tools=tools, must_call=True)
        grammars = GrammarTokenizer(own, len(own), frozenset({own.eos_token_id}))
        matcher = rule_of_calls(form(family), options, own, grammars).matcher()
        for seed in range(20):
            text = drawn(own, matcher.deep_copy(), random.Random(seed))
            found = calls_in(form(family), text, tools, "job")
            assert found is not None, text
            assert found.content is None, text
            for name, arguments in called(found):
                jsonschema.validate(arguments, MANY if name == "f" else {"maxProperties": 0})


MANY = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 12},
        "kind": {"type": "string", "enum": ["a/b", "c.d\n", ""]},
        "code": {"type": "string", "pattern": "^[a-z/]{2,4}$", "minLength": 3},
        "count": {"$ref": "#/$defs/Count"},
        "words": {"type": "array", "items": {"enum": ["x", "y<z"]}, "maxItems": 3},
        "maybe": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
    },
    "required": ["text", "count"],
    "additionalProperties": False,
    "$defs": {"Count": {"type": "integer", "minimum": 0, "maximum": 99}},
}


def drawn(tokenizer: Any, matcher: LLMatcher, chance: random.Random) -> str:
    """Return a random text of a grammar that ends soon."""
    marked = {token: number for token, number in tokenizer.get_vocab().items() if token in MARKS}
    token_ids: list[int] = []
    while not (matcher.is_accepting() and (len(token_ids) > 400 or chance.random() < 0.3)):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        allowed = [each for each in tokens_of(mask).tolist() if each != tokenizer.eos_token_id]
        if not allowed:
            break
        closing = [each for each in allowed if each in marked.values()]
        token_ids.append(chance.choice(closing if closing and chance.random() < 0.3 else allowed))
        assert matcher.consume_token(token_ids[-1])
    steps = steps_of(tokenizer)
    return ByteText(TokenBytes(tokenizer, steps, tuple(marked)), steps).decode(token_ids)


def is_whole(matcher: LLMatcher, token_ids: list[int]) -> bool:
    copied = matcher.deep_copy()
    return bool(copied.consume_tokens(token_ids) and copied.is_accepting())


def test_every_form_has_a_sample() -> None:
    assert [form.family for form in FORMS] == list(FAMILIES)


@pytest.mark.parametrize(
    "template", ["{{ messages }}", '{"tool_name": the title, "parameters": a dict}', "<|tool_call|>"]
)
def test_a_form_that_no_template_shows_is_unknown(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert form_of(tokenizer) is None


def test_a_call_that_follows_a_broken_one_at_once_is_found() -> None:
    found = calls_in(form("Hermes, Qwen"), '<tool_call><tool_call>{"name": "now", "arguments": {}}', TOOLS, "job")
    assert (called(found), found.content) == ([("now", {})], "<tool_call>")


@pytest.mark.parametrize(
    ("family", "start", "end"),
    [
        ("GLM", "<tool_call>weather", "</tool_call>"),
        ("Qwen3-Coder", "<tool_call><function=weather>", "</function></tool_call>"),
    ],
)
def test_tags_around_more_than_arguments_are_no_call(family: str, start: str, end: str) -> None:
    assert calls_in(form(family), f"{start} today{end}", TOOLS, "job") is None
    assert calls_in(form(family), f"{start}\n{end}", TOOLS, "job") is not None
    for tags in ("<arg_key>a</arg_key><arg_value>", "<arg_key>", "<parameter=a>", "<parameter="):
        assert calls_in(form(family), f"{start}{tags * (200_000 // len(tags))}{end}", TOOLS, "job") is None


def test_a_tagged_argument_is_what_its_schema_says() -> None:
    schema = {"properties": {"zip": {"type": "string"}, "days": {"type": ["integer", "null"]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    said = {"zip": "123", "days": "4", "more": "[1, 2]", "words": "not JSON"}
    pairs = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in said.items())
    found = calls_in(form("GLM"), f"<tool_call>f{pairs}</tool_call>", tools, "job")
    assert called(found) == [("f", {"zip": "123", "days": 4, "more": [1, 2], "words": "not JSON"})]


def test_a_schema_that_cannot_be_followed_is_named(tokenizer: Any) -> None:
    bad = {"type": "function", "function": {"name": "g", "parameters": {"properties": {"a": {"not": {}}}}}}
    options = TemplateOptions(tools=(*TOOLS, bad), must_call=True)
    grammars = GrammarTokenizer(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    with pytest.raises(
        ConstraintError, match=r"field 'tools\[2\]\.function\.parameters': found \"not\", not supported"
    ):
        rule_of_calls(form("Llama 3"), options, tokenizer, grammars)


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        (
            {"properties": {"a": {"type": "string", "format": "date"}}},
            'found "format" of "a", expected none in a string',
        ),
        ({"properties": {"a<b": {}}}, 'found the argument "a<b", which this model\'s form of calls cannot write'),
        ({"properties": {}, "required": ["a"]}, 'found the argument "a", which'),
        ({"anyOf": [{"required": []}]}, 'found "anyOf", which this model\'s form of calls cannot follow'),
    ],
)
@pytest.mark.parametrize("family", ["GLM", "Qwen3-Coder"])
def test_what_tags_cannot_write_is_refused(
    tokenizer: Any, family: str, parameters: dict[str, Any], problem: str
) -> None:
    options = TemplateOptions(tools=({"type": "function", "function": {"name": "g", "parameters": parameters}},))
    grammars = GrammarTokenizer(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    with pytest.raises(ConstraintError, match=re.escape(f"field 'tools[0].function.parameters': {problem}")):
        rule_of_calls(form(family), options, tokenizer, grammars)


@pytest.mark.parametrize("family", ["GLM", "Hermes, Qwen", "Llama 3"])
@pytest.mark.parametrize("kind", ["array", ["string", "null"]])
def test_arguments_that_are_no_object_are_refused(tokenizer: Any, family: str, kind: Any) -> None:
    options = TemplateOptions(tools=({"type": "function", "function": {"name": "g", "parameters": {"type": kind}}},))
    grammars = GrammarTokenizer(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    problem = f'found the type {json.dumps(kind)}, expected "object"'
    with pytest.raises(ConstraintError, match=re.escape(f"field 'tools[0].function.parameters': {problem}")):
        rule_of_calls(form(family), options, tokenizer, grammars)


@pytest.mark.parametrize("family", ["GLM", "Qwen3-Coder"])
def test_json_in_a_tag_may_contain_tags(family: str) -> None:
    schema = {"properties": {"words": {"type": "array"}, "more": {"type": "string"}}}
    tools = ({"type": "function", "function": {"name": "f", "parameters": schema}}, TOOLS[1])
    words = ["</arg_value>", "<arg_key>", "</parameter>\n", "</tool_call>", "<tool_call>"]
    text = FAMILIES[family][1].replace("weather", "f").replace("city", "more").replace("days", "words")
    text = text.replace("\n3\n", f"\n{json.dumps(words)}\n").replace(">3<", f">{json.dumps(words)}<")
    found = calls_in(form(family), f"\n{text}\n", tools, "job")
    assert (called(found), found.content) == ([("f", {"more": "Oslo {\n", "words": words}), ("now", {})], None)
