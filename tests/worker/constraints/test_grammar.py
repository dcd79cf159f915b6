"""A grammar's masks depend on the tokens alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from swiftbatch.jobs.structured_output import structure_of
from swiftbatch.worker.constraints import grammar as grammars
from swiftbatch.worker.constraints.grammar import TRIED_FUEL, Grammar, GrammarConstraint
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.sampling.token_masks import ConstraintError, allows, tokens_of
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.constraints.words import END, VOCAB, grammar, mask_behind

TEXTS = {"abc", "abd", "abcda", "da", "dab", "cccc"}
CHOICE = {"choice": sorted(TEXTS)}


@pytest.fixture(scope="module")
def codec(embedded_files: ModelFiles) -> TextCodec:
    return TextCodec(embedded_files)


def rule(codec: TextCodec, **structure: Any) -> grammars.Grammar:
    given = structure_of(structure)
    return codec._grammars.grammar(given)


@pytest.mark.parametrize("seed", range(4))
def test_a_mask_is_a_function_of_the_tokens_whatever_was_tried_between(seed: int) -> None:
    chance, state, token_ids = random.Random(seed), GrammarConstraint(grammar(**CHOICE)), []
    for _ in range(200):
        mask = state.mask()
        if token_ids[-1:] == [END]:
            assert mask is None
        else:
            assert np.array_equal(mask, mask_behind(TEXTS, token_ids))
        allowed = [] if mask is None else [token_id for token_id in range(VOCAB) if allows(mask, token_id)]
        if allowed and chance.random() < 0.7:
            token_ids.append(chance.choice(allowed))
            state.push(token_ids[-1])
        elif token_ids:
            num_back = chance.randrange(1, len(token_ids) + 1)
            del token_ids[-num_back:]
            state.pop(num_back)


SCHEMA = {
    "type": "object",
    "properties": {
        "the name": {"type": "string", "maxLength": 12},
        "trades": {"type": "array", "items": {"enum": ["miller of the village", "smith"]}, "maxItems": 3},
        "nothing": {"type": "null"},
    },
    "required": ["the name", "trades", "nothing"],
}


@pytest.mark.parametrize("seed", range(3))
def test_a_mask_is_that_of_one_who_only_read_the_tokens(codec: TextCodec, seed: int) -> None:
    """Masks agree also where the library knows the text and its tokens in advance."""
    chance, built, token_ids = random.Random(seed), rule(codec, json=SCHEMA), []
    state = GrammarConstraint(built)
    for _ in range(150):
        mask = state.mask()
        if mask is None:
            break
        reader = GrammarConstraint(built)
        for token_id in token_ids:
            reader.push(token_id)
        fresh = built.rebuilt(token_ids).compute_bitmask()
        assert np.array_equal(mask, reader.mask())
        assert mask.tobytes() == fresh[: mask.nbytes]
        token_ids.append(int(chance.choice(tokens_of(mask))))
        state.push(token_ids[-1])
        if chance.random() < 0.3:
            num_back = chance.randrange(1, min(6, len(token_ids) + 1))
            state.pop(num_back)
            del token_ids[-num_back:]
    assert len(token_ids) > 10


def test_a_token_that_can_t_come_is_refused_and_changes_nothing() -> None:
    state = GrammarConstraint(grammar(**CHOICE))
    state.push(4)  # ab
    with pytest.raises(ConstraintError):
        state.push(0)
    assert np.array_equal(state.mask(), mask_behind(TEXTS, [4]))


def test_limits_that_count_what_was_looked_at_are_begun_anew(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts look at more than plain decoding, and must not make a job fail."""
    schema = {"type": "array", "items": {"type": "string", "pattern": "^([a-c]{2,9}|[d-f]{3,8})+$"}}
    text = '["abcabcab", "dddeeef", "abcdddefefef", "ccccc"]'
    token_ids = codec.encode(text, add_special_tokens=False)

    def masks() -> tuple[list[bytes], int]:
        built = rule(codec, json=schema)
        before, state = num_built[0], GrammarConstraint(built)
        found = []
        for token_id in token_ids:
            found.append(np.array(state.mask()).tobytes())
            state.push(token_id)
        return found, num_built[0] - before

    num_built, plain = [0], grammars.Grammar._built

    def counted(self: grammars.Grammar, definition: str, fuel: int = grammars.STEP_FUEL) -> Any:
        num_built[0] += 1
        return plain(self, definition, fuel)

    monkeypatch.setattr(grammars.Grammar, "_built", counted)
    expected, num_anew = masks()
    assert num_anew == 0

    def tight(self: grammars.Grammar, definition: str, fuel: int = grammars.STEP_FUEL) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        if fuel != grammars.STEP_FUEL:  # it is only tried
            return plain(self, definition, fuel)
        num_built[0] += 1
        limits = LLParserLimits(max_lexer_states=55, verbose_errors=False)
        return LLMatcher(self._tokenizer, definition, log_level=0, limits=limits)

    monkeypatch.setattr(grammars.Grammar, "_built", tight)
    codec._grammars.grammar.cache_clear()
    found, num_anew = masks()
    codec._grammars.grammar.cache_clear()
    assert num_anew > 0
    assert found == expected


BAD: list[tuple[dict[str, Any], str]] = [
    ({"regex": "("}, "unclosed group"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": r"[^\s\S]"}, "it allows no text"),
    ({"regex": "(" * 5000 + "a" + ")" * 5000}, "nest"),
    ({"json": {"type": "strange"}}, "strange"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum (3)"),
    ({"json": {"type": "number", "minimum": 1e300}}, "from 1e300 to any, expected bounds with at most 17 digits"),
    ({"json": {"type": "number", "minimum": 0, "maximum": 1e19}}, "to 1e19, expected bounds with at most 17 digits"),
    ({"json": {"type": "number", "multipleOf": 1e20}}, "found multipleOf with more than 9 digits"),
    ({"json": {"type": "number", "minimum": 5e-324}}, "a number with too many digits"),
    ({"json": {"type": "number", "minimum": "5"}}, "Expected a number for 'minimum', got \"5\""),
    ({"json": {"$ref": "#/absent"}}, "'/absent' does not exist"),
    (
        {"json": {"$ref": "https://example.com/a.json"}},
        "found $ref to 'https://example.com/a.json', not supported; expected",
    ),
    ({"json": {"$ref": "#/ab sent"}}, "'/ab%20sent' does not exist"),
    ({"json": {"not": {"type": "string"}}}, 'found "not", not supported; expected no such keyword'),
    ({"json": {"uniqueItems": True, "contains": {}}}, 'found "contains", "uniqueItems", not supported'),
    ({"json": {"propertyNames": {"pattern": "a"}}}, 'found "propertyNames", not supported'),
    ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "that the same value can match, not supported"),
    ({"json": {"allOf": [{"anyOf": [{"pattern": f".*{c}{d}.*"} for c in "abcd"]} for d in "efghijkl"]}}, "too large"),
    ({"json": {"const": 2**53 + 1}}, "found the whole number 9007199254740993"),
    ({"json": {"properties": {"const": {"enum": [[{"a": 10**25 + 1}]]}}}}, "found the whole number 1000"),
    ({"json": {"type": "object", "minProperties": 2}}, "found minProperties 2, expected at most 1"),
    ({"json": '{"items":' * 700 + "{}" + "}" * 700}, "nested too deeply"),
    ({"regex": "a{1000000}"}, "too large to follow"),
    ({"grammar": 'root ::= "a" root'}, "too large to follow"),
    ({"regex": "(.{1,100}){100}"}, "it is too large to follow: a token may take too many steps"),
    ({"regex": r"((\w+\s?){1,50}[,;]?){1,80}"}, "too large to follow"),
    ({"grammar": "start: absent"}, 'line 1: unknown name: "absent"'),
    ({"grammar": 'start: "a"\n  b'}, "line 2: "),
    ({"grammar": 'root ::= "a" b\n\nb ::= [z-a]'}, "': invalid character class range"),
    ({"grammar": 'root ::= "a"\n\nb ::= ) "a"'}, "at line 3"),
    ({"grammar": 'root ::= "\\ud83d"'}, r"found \ud83d, expected the number of a character"),
    ({"grammar": 'root ::= "a\\'}, "found a backslash at its end"),
    ({"grammar": 'start: <|endoftext|> "a"'}, "found <|endoftext|>, which ends the text"),
    ({"grammar": 'start: "a" <[0-3]> "b"'}, "found <[0-3]>, which ends the text"),
    ({"grammar": 'start: "a" <absent> "b"'}, 'unknown special token: "<absent>"'),
    ({"grammar": "root ::= absent"}, "absent"),
    ({"grammar": 'start: start "a"'}, "it allows no text"),
]


@pytest.mark.parametrize(("structure", "reason"), BAD)
def test_what_can_t_be_a_grammar_is_refused_in_one_line_with_field_and_reason(
    codec: TextCodec, structure: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConstraintError) as refusal:
        rule(codec, **structure)
    [name] = structure
    assert str(refusal.value).startswith(f"field 'structured_outputs.{name}': ")
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


HARD = (
    {"regex": "(a{1,1000}){1,1000}"},
    {"regex": "((a|b)*c){1,500}.*x.{400}"},
    {"regex": ".*a.{30}"},
    {"json": {"properties": {f"p{i}": {"type": "string", "pattern": ".*a.{20}"} for i in range(500)}}},
    {"choice": [f"text number {i}" for i in range(2000)]},
)


@pytest.mark.parametrize("structure", HARD)
def test_what_is_hard_to_follow_takes_little_at_each_token(
    codec: TextCodec, structure: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's fuel is equal on all machines; a twentieth per token suffices."""
    monkeypatch.setattr(Grammar._built, "__defaults__", (TRIED_FUEL,))
    chance, state = random.Random(1), GrammarConstraint(rule(codec, **structure))
    for _ in range(30):
        mask = state.mask()
        if mask is None:
            break
        state.push(int(chance.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))))


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (r'root ::= "\u00e9\U0001F600\x41\u0042\u0022"', 'é😀AB"'),
        (r"root ::= [\u00e0-\u00ff]+ [\U0001F600-\U0001F610]", "éà😀"),
        (r'root ::= "\\u00e9"', r"\u00e9"),
        ('start: "<|endoftext|>" /<[a-z]>/ // <|endoftext|>', "<|endoftext|><q>"),
    ],
)
def test_a_grammar_s_letters_are_what_their_escapes_say(codec: TextCodec, said: str, text: str) -> None:
    matcher = rule(codec, grammar=said).matcher()
    halves = (text[:5], text[5:])  # none is a special token
    encoded = [token_id for half in halves for token_id in codec.encode(half, add_special_tokens=False)]
    assert matcher.try_consume_tokens(encoded) == len(encoded)
    assert matcher.is_accepting()


def test_choices_are_texts_whatever_letters_they_have(codec: TextCodec) -> None:
    texts = ["a.b*", "(yes)", "a/b\\c", 'say "no"', "two\nlines", "é « 😀", "a b#c&d~e-f", "[x]{2}^$|?+"]
    built = rule(codec, choice=texts)
    for text in texts:
        state = GrammarConstraint(built)
        for token_id in codec.encode(text, add_special_tokens=False):
            mask = state.mask()
            assert allows(mask, token_id)
            state.push(token_id)
        end = state.mask()
        assert np.flatnonzero(np.unpackbits(end.view(np.uint8), bitorder="little")).tolist() == [0]  # end of text


@pytest.mark.parametrize("seed", range(4))
def test_whole_numbers_beyond_53_bits_stay_within_their_bounds(codec: TextCodec, seed: int) -> None:
    least, most = 2**53 + 1, 2**53 + 3
    built = rule(codec, json={"type": "integer", "minimum": least, "maximum": most})
    chance, state, token_ids = random.Random(seed), GrammarConstraint(built), list[int]()
    while (mask := state.mask()) is not None:
        token_ids.append(int(chance.choice(tokens_of(mask))))
        state.push(token_ids[-1])
    assert least <= int(codec.decode(token_ids)) <= most


@pytest.mark.parametrize("value", [2**53, 10**22, -(10**15) + 1, 0.1, 1e300])
def test_a_number_that_can_be_written_is_taken(codec: TextCodec, value: float) -> None:
    rule(codec, json={"const": value})


def test_the_range_of_64_bit_numbers_is_taken(codec: TextCodec) -> None:
    rule(codec, json={"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1})
    built = rule(codec, json={"type": "integer", "minimum": -1e300, "maximum": 7})  # and what exceeds it
    for text, num_taken in (("-123", 4), ("7", 1), ("8", 0)):
        token_ids = [codec.encode(letter, add_special_tokens=False)[0] for letter in text]
        assert built.matcher().try_consume_tokens(token_ids) == num_taken


@pytest.mark.parametrize("kept", [{"const": {"maximum": 2**53 + 3}}, {"default": {"maximum": 2**63 - 1}}])
def test_a_property_called_as_a_keyword_is_none(codec: TextCodec, kept: dict[str, Any]) -> None:
    rule(codec, json={"type": "object", "properties": kept})


def accepts(codec: TextCodec, schema: dict[str, Any], text: str) -> bool:
    matcher = rule(codec, json=schema).matcher()
    matcher.try_consume_tokens(token_ids := codec.encode(text, add_special_tokens=False))
    return bool(matcher.is_accepting()) and codec.decode(token_ids) == text


NAMES = {"a": {"type": "integer"}, 'say "b"': {"type": "integer"}, "two\nlines": {"type": "integer"}}
OTHER_SPELLINGS = (r"\u0061", r"say \u0022b\u0022", r"say \"\u0062\"", r"two\u000alines", r"tw\u006F\nlines")
OPEN_OBJECTS = {
    "open": {"type": "object", "properties": NAMES},
    "other values": {"type": "object", "properties": NAMES, "additionalProperties": {"type": "string"}},
    "patterns": {"type": "object", "properties": NAMES, "patternProperties": {"^x-": {"type": "string"}}},
    "in parts": {"allOf": [{"type": "object", "properties": {name: value}} for name, value in NAMES.items()]},
    "referred to": {"$ref": "#/$defs/one", "$defs": {"one": {"type": "object", "properties": NAMES}}},
}


@pytest.mark.parametrize("schema", OPEN_OBJECTS.values(), ids=OPEN_OBJECTS)
def test_a_key_of_the_schema_does_not_come_as_another_key_in_another_spelling(
    codec: TextCodec, schema: dict[str, Any]
) -> None:
    assert accepts(codec, schema, r'{"a":1,"say \"b\"":2,"two\nlines":3,"x-é\t":"\b\f\r\\"}')
    for spelling in OTHER_SPELLINGS:
        assert not accepts(codec, schema, f'{{"{spelling}":"s"}}')
        assert not accepts(codec, schema, f'{{"{spelling}":1}}')


def test_a_schema_may_name_characters_that_have_no_other_escape(codec: TextCodec) -> None:
    assert accepts(codec, {"enum": ["a\x01", "b\x7f"]}, r'"a\u0001"')
    assert accepts(codec, {"enum": ["a\x01", "b\x7f"]}, r'"b\u007f"')


SPELLED = [
    ({"choice": ["<|endoftext|>"]}, "<|endoftext|>"),
    ({"regex": r"x<\|endoftext\|>y"}, "x<|endoftext|>y"),
    ({"json": {"const": "<|endoftext|>"}}, '"<|endoftext|>"'),
    ({"grammar": 'start: "<|endoftext|>a"'}, "<|endoftext|>a"),
]


def longest(built: Grammar, mask: np.ndarray) -> int:
    token_ids = tokens_of(mask)
    return int(token_ids[np.argmax(built.token_lengths[token_ids])])


@pytest.mark.parametrize(("structure", "text"), SPELLED)
def test_a_text_that_spells_the_end_of_text_comes_letter_by_letter(
    codec: TextCodec, structure: dict[str, Any], text: str
) -> None:
    built, token_ids = rule(codec, **structure), list[int]()
    state = GrammarConstraint(built)
    while (mask := state.mask()) is not None:
        token_ids.append(longest(built, mask))
        state.push(token_ids[-1])
    assert b"".join(codec.token_bytes(token_id) for token_id in token_ids[:-1]).decode() == text
    assert token_ids[-1] in codec._grammars._eos_token_ids


def test_an_end_that_is_spelled_behind_a_long_text_comes_letter_by_letter_too(codec: TextCodec) -> None:
    built, token_ids = rule(codec, regex=r"[a-z]{400}<\|endoftext\|>y"), codec.encode("a" * 400, False)
    state, num_before = GrammarConstraint(built), len(token_ids)
    for token_id in token_ids:
        state.push(token_id)
    while (mask := state.mask()) is not None:
        resumed = GrammarConstraint(built)
        for token_id in token_ids:
            resumed.push(token_id)
        assert np.array_equal(resumed.mask(), mask)
        token_ids.append(longest(built, mask))
        state.push(token_ids[-1])
    spelled = b"".join(codec.token_bytes(token_id) for token_id in token_ids[num_before:-1])
    assert spelled == b"<|endoftext|>y"
    assert token_ids[-1] in codec._grammars._eos_token_ids
    state.pop(len(token_ids) - num_before)
    assert tokens_of(state.mask()).tolist() == codec.encode("<", False)
