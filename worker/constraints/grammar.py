"""Structured output: which tokens a grammar, a schema or a regular expression allows next."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import numpy as np

from swiftbatch.jobs.structured_output import DATA, FOLLOWED_FORMATS, NAMED, Structure
from swiftbatch.worker.sampling.token_masks import ConstraintError, allows, num_mask_words, tokens_of

if TYPE_CHECKING:
    from swiftbatch.worker.sampling.sequence import Sequence

# between the parts of JSON: a blank, or a line end and an indent; a model that drifts into blanks would never come back
WHITESPACE = r"( |\r?\n[ \t]{0,32})?"
# no \u: with it the library takes "\u0061" for another key than "a"; but a schema may name what has no other escape
ESCAPES = 'nrbtf\\"'
ESCAPED = re.compile(r"\\u00[01]|\x7f")  # in a schema as JSON
SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")  # in a regular expression
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.?))", re.DOTALL)  # of GBNF
# in Lark: what may hold the signs of a token without being one, and a token
QUOTED_OR_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/|(<[^<>\s]+>)')
PLACE = re.compile(r"^(?:at )?(\d+)\(\d+\): ")
RANGE = re.compile(r"Failed to generate regex for \w+ range: min=(?:Some\((.*?)\)|None), max=(?:Some\((.*?)\)|None)")
PLAIN_WORDS = (  # in place of what the library says of its own ways
    (re.compile(r"NoExtensionBias"), "it allows no text"),
    (re.compile(r"lexer error: too many expressions constructed"), "a token may take too many steps"),
    (re.compile(r"Value for 'multipleOf' has too many digits: .*"), "found multipleOf with more than 9 digits in all"),
    (re.compile(r"exceed the maximum number of nested .*"), "nested too deeply, or a number with too many digits"),
    (re.compile(r"Expected f64 for"), "Expected a number for"),
    (
        re.compile(r"oneOf constraints are not supported\. .*"),
        "found oneOf with alternatives that the same value can match, not supported; expected anyOf, or alternatives "
        "that exclude each other, for example by a const",
    ),
)
UNKNOWN_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
CONVERTING = "Failed to convert the grammar from GBNF to Lark: "
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
LEAST = -(2**63) + 1  # below it the library knows no range of whole numbers; of others it knows none so long
NO_SIGNS_ALONE = "^(?!^[-+.]*$)"  # begins the pattern that pydantic writes for a decimal number
POINTER_CHARACTERS = "/~!$&'()*+,;=:@"  # beside letters and digits, those of a JSON pointer that a URI may have


class StructureError(ConstraintError):
    """A structure that can't be followed; `reason` says why, without a field."""

    def __init__(self, structure: Structure, reason: str) -> None:
        super().__init__(f"field 'structured_outputs.{structure.kind}': {reason}")
        self.reason = reason


def definition_of(structure: Structure) -> str:
    """A structure in the library's own form. Raises ValueError for one that can't be taken over."""
    from llguidance import LLMatcher

    if structure.kind == "regex":
        return LLMatcher.grammar_from_regex(structure.text)
    if structure.kind == "choice":
        return LLMatcher.grammar_from_regex(
            "|".join(SPECIAL.sub(r"\\\g<0>", each) for each in json.loads(structure.text))
        )
    if structure.kind == "grammar":
        return _grammar(structure.text)
    schema = kept_schema(structure.text) if structure.kind == "json" else '{"type": "object"}'
    escapes = ESCAPES + ("u" if ESCAPED.search(schema) else "")
    return LLMatcher.grammar_from_json_schema(
        schema, defaults={"whitespace_pattern": WHITESPACE, "json_allowed_escapes": escapes}
    )


def unforced(definition: str) -> str:
    """The definition where nothing is cut into tokens ahead: what has to come comes in any tokens that spell it."""
    lark = definition
    if definition.startswith("{"):  # which Lark does not
        [only] = json.loads(definition)["grammars"]
        schema = only.get("json_schema")
        lark = only["lark_grammar"] if schema is None else f"start: %json {json.dumps(schema)}"
    return f'%llguidance {{"no_forcing": true}}\n{lark}'


def is_lark(structure: Structure) -> bool:
    """Return whether the library takes the structure as it is written: then it knows the user's own lines."""
    from llguidance.gbnf_to_lark import is_lark_syntax

    return structure.kind == "grammar" and is_lark_syntax(structure.text)


def named_tokens(lark: str) -> list[str]:
    """The tokens that a Lark grammar names, as it writes them: `<|end|>`, `<[7]>`."""
    return list(dict.fromkeys(found[1] for found in QUOTED_OR_TOKEN.finditer(lark) if found[1]))


def reason_of(text: str, has_lines: bool = False) -> str:
    """The library's words in one line; with `has_lines` its numbers of lines are the user's, and are told."""
    place = PLACE.match(text)
    lines = [PLACE.sub("", line).strip() for line in text.split("<state>")[0].splitlines()]
    lines = [line for line in lines if line and not line.startswith("<")]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    first = (said or lines or ["it gives no reason"])[0]
    for words, plain in PLAIN_WORDS:
        first = words.sub(plain, first)
    if bounds := RANGE.search(first):
        least, most = (bound or "any" for bound in bounds.groups())
        first = f"found numbers from {least} to {most}, expected bounds with at most 17 digits"
    if unknown := UNKNOWN_KEYS.search(first):
        first = f"found {unknown[1]}, not supported; expected no such keyword"
    return f"line {place[1]}: {first[:300]}" if place and has_lines else first[:300]


def _grammar(text: str) -> str:
    from llguidance import grammar_from
    from llguidance.gbnf_to_lark import is_lark_syntax

    try:
        return grammar_from("grammar", text if is_lark_syntax(text) else ESCAPE.sub(_unescaped, text))
    except ValueError as error:
        raise ValueError(str(error).removeprefix(CONVERTING)) from None


def _unescaped(found: re.Match[str]) -> str:
    """A GBNF escape by its number as the character itself: the library loses zeros of those numbers.

    ASCII ones may steer what they stand in, and keep a form that it knows.
    """
    digits = found[1] or found[2]
    if digits is None:
        if not found[3]:
            raise ValueError("found a backslash at its end, expected an escape as \\n")
        return found[0]
    number = int(digits, 16)
    if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
        raise ValueError(f"found {found[0]}, expected the number of a character")
    return f"\\x{number:02x}" if number < 0x80 else chr(number)


def kept_schema(text: str) -> str:
    """A schema that lets come what this one does, or less where a bound lies between two float64.

    Raises ValueError, with the reason, where the library would let come what does not fit.
    """
    try:
        whole = json.loads(text)
        return json.dumps(_schema(whole, whole), separators=(",", ":"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _schema(value: Any, whole: Any) -> Any:
    if isinstance(value, list):
        return [_schema(each, whole) for each in value]
    if not isinstance(value, Mapping):
        return value
    _check_names(value)
    kept = {name: _keyword(name, each, whole) for name, each in value.items() if not _is_idle(name, each)}
    pattern, others = kept.get("pattern"), kept.get("allOf", [])
    if isinstance(pattern, str) and pattern.startswith(NO_SIGNS_ALONE) and isinstance(others, list):
        rest = f"^{pattern.removeprefix(NO_SIGNS_ALONE)}"  # without the look-ahead, which the library does not have
        kept |= {"pattern": rest, "allOf": [*others, {"pattern": "[^-+.]"}]}
    return kept


def _is_idle(name: str, value: Any) -> bool:
    """Tell whether a keyword is an annotation alone: the library refuses formats that it does not know."""
    return name == "format" and isinstance(value, str) and value not in FOLLOWED_FORMATS


def _keyword(name: str, value: Any, whole: Any) -> Any:
    if name in NAMED and isinstance(value, Mapping):
        return {each: _schema(schema, whole) for each, schema in value.items()}
    if name == "$ref" and isinstance(value, str) and value.startswith("#/"):
        return _reference(value.removeprefix("#"), whole)
    if name in ("const", "enum"):
        _check_value(value)
    if name in DATA:
        return value
    if name in LOWER and type(value) in (int, float) and value < LEAST:
        value = LEAST
    if name in LOWER + UPPER and type(value) is int:
        return _bound(value, math.inf if name in LOWER else -math.inf)
    return _schema(value, whole)


def _reference(pointer: str, whole: Any) -> str:
    """A reference within a schema, as a URI writes it: programs write names such as `List[int]` as they are."""
    plain = unquote(pointer)
    if plain != pointer and _has(whole, pointer) and not _has(whole, plain):
        plain = pointer
    return f"#{quote(plain, POINTER_CHARACTERS)}"


def _has(value: Any, pointer: str) -> bool:
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    return True


def _bound(value: int, inward: float) -> float | int:
    """The number itself, or the next float64 that is further within."""
    try:
        near = int(float(value))
    except OverflowError:
        return value
    if near == value or (near > value) == (inward > 0):
        return near
    return int(math.nextafter(near, inward))


def _check_value(value: Any) -> None:
    """Raise ValueError for a value with a whole number that would be written as another."""
    if isinstance(value, list | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            _check_value(each)
    elif type(value) is int and (abs(value) >= 10**308 or Decimal(repr(float(value))) != value):
        raise ValueError(f"found the whole number {value}, expected one of at most 15 digits, or the number as text")


def _check_names(schema: Mapping[str, Any]) -> None:
    """Raise ValueError for a `minProperties` that needs two names the schema does not say: the same may come twice."""
    least, said = schema.get("minProperties"), schema.get("properties")
    is_open = schema.get("additionalProperties") is not False or "patternProperties" in schema
    num_said = len(said) if isinstance(said, Mapping) else 0
    if is_open and isinstance(least, int) and least > num_said + 1:
        raise ValueError(
            f"found minProperties {least}, expected at most {num_said + 1}: one more than there are `properties`"
        )


# Structured output: the tokens with which a text can still become one of a grammar's, as llguidance tells them.


CACHED = 256  # grammars

# beyond the library's own: a choice among thousands is one row of items, and time is bounded by fuel all the same
MAX_ROW_ITEMS, MAX_STEP_ITEMS, STEP_FUEL = 20_000, 500_000, 2_000_000
TRIED_FUEL, NUM_TRIED = 100_000, 16  # fuel for a token when a grammar is taken in, and the tokens to try it on


class Grammar:
    """A structure that was understood, over one model's tokens. As a `Rule`: the output is a text of the grammar."""

    def __init__(
        self,
        tokenizer: Any,
        definition: str,
        eos_token_ids: frozenset[int],
        token_lengths: np.ndarray,
        has_lines: bool = False,
    ) -> None:
        """`tokenizer`: llguidance's; `token_lengths [vocab]` in bytes, 0 for an end; `has_lines`: see `reason_of`.

        Raises ConstraintError, with its reason, for a grammar that can't be.
        """
        self.eos_token_ids, self.token_lengths = eos_token_ids, token_lengths
        self.num_words = num_mask_words(len(token_lengths))
        self._tokenizer, self._definition = tokenizer, definition
        self._first = self._built(definition)
        mask = self._first.compute_bitmask()
        if self._first.is_error():
            raise ConstraintError(reason_of(self._first.get_error(), has_lines))
        if not any(mask):
            raise ConstraintError("it allows no text")
        self._check_ahead()

    def matcher(self) -> Any:
        """An `LLMatcher` in front of the first token."""
        return self._first.deep_copy()

    def rebuilt(self, token_ids: list[int]) -> Any:
        """An `LLMatcher` behind some tokens that shares nothing with others. It may be in an error."""
        matcher = self._built(self._definition)
        matcher.consume_tokens(token_ids)
        return matcher

    def mask(self, matcher: Any, token_ids: list[int]) -> np.ndarray:
        """The tokens that may come behind some others, where a matcher stands. The matcher may be in an error then.

        The tokenizer cuts what has to come into tokens. It takes the name of a special token for that token, though it
        stands for no text: there, and there alone, any tokens may come that spell the name.
        """
        mask = self._words(matcher)
        if np.count_nonzero(mask) != 1 or matcher.is_error() or matcher.is_accepting() or matcher.is_stopped():
            return mask
        only = tokens_of(mask).tolist()
        if len(only) > 1 or matcher.validate_tokens(only) == 1:
            return mask
        spelling = self._built(unforced(self._definition))
        spelling.consume_tokens(token_ids)
        mask = self._words(spelling)
        if spelling.is_error():
            raise ConstraintError(f"the grammar's state can't be told: {reason_of(spelling.get_error())}")
        return mask

    def start(self, sequence: Sequence) -> GrammarConstraint:
        return GrammarConstraint(self)

    def _check_ahead(self) -> None:
        """Raise ConstraintError for a grammar that takes longer to follow than a model to run: tried on long tokens.

        What counts is the library's fuel, which is the same on all machines, and not the time.
        """
        ahead, token_ids = self._built(self._definition, TRIED_FUEL), list[int]()
        for _ in range(NUM_TRIED):
            mask = self.mask(ahead, token_ids)
            if ahead.is_error():
                raise ConstraintError(f"it is too large to follow: {reason_of(ahead.get_error())}")
            allowed = tokens_of(mask)
            longest = int(allowed[np.argmax(self.token_lengths[allowed])])
            if longest in self.eos_token_ids:
                return
            ahead.consume_token(longest)
            token_ids.append(longest)

    def _words(self, matcher: Any) -> np.ndarray:
        """A matcher's mask, `[num_words]`; the library's are rounded up."""
        return np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)[: self.num_words]

    def _built(self, definition: str, fuel: int = STEP_FUEL) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_items_in_row=MAX_ROW_ITEMS,
            step_max_items=MAX_STEP_ITEMS,
            step_lexer_fuel=fuel,
            verbose_errors=False,
        )
        return LLMatcher(self._tokenizer, definition, log_level=0, limits=limits)


class GrammarConstraint:
    """A grammar behind some tokens. What follows an end-of-text token matters to nobody, and is not restricted."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher()
        self._token_ids: list[int] = []
        self._num_past_end = 0

    def mask(self) -> np.ndarray | None:
        if self._num_past_end:
            return None
        mask = self._grammar.mask(self._matcher, self._token_ids)
        if self._matcher.is_error():
            self._rebuild()
            mask = self._grammar.mask(self._matcher, self._token_ids)
            self._check()
        return mask

    def is_free(self, token_ids: list[int]) -> bool:
        return self._num_past_end > 0

    def guess(self, token_ids: np.ndarray) -> int:
        """The longest: what has to come is mostly written with as few tokens as can be."""
        return int(token_ids[np.argmax(self._grammar.token_lengths[token_ids])])

    def push(self, token_id: int) -> None:
        if self._num_past_end or token_id in self._grammar.eos_token_ids:
            self._num_past_end += 1
            return
        self._token_ids.append(token_id)
        if not self._matcher.consume_token(token_id):
            try:
                self._rebuild()
            except ConstraintError:
                self._token_ids.pop()
                self._matcher = self._grammar.rebuilt(self._token_ids)
                raise

    def pop(self, num_tokens: int) -> None:
        num_past_end = min(num_tokens, self._num_past_end)
        self._num_past_end -= num_past_end
        if num_left := num_tokens - num_past_end:
            del self._token_ids[-num_left:]
            if not self._matcher.rollback(num_left):
                self._rebuild()

    def _rebuild(self) -> None:
        """Forget what the library has kept of all it looked at, which counts towards its limits."""
        self._matcher = self._grammar.rebuilt(self._token_ids)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(f"the grammar's state can't be told: {reason_of(self._matcher.get_error())}")


class GrammarTokenizer:
    """A model's tokens as llguidance knows them, and the grammars that were asked for over them."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """`tokenizer`: a fast one of `transformers`. Raises ConstraintError for one that has no bytes to speak of."""
        from llguidance import LLTokenizer

        self._eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        if not self._eos_token_ids:
            raise ConstraintError("the model has no end-of-text token, so no text of a grammar would end")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        try:
            if backend is None:
                raise ValueError("it is none of the tokenizers library")
            self._tokenizer = LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=sorted(self._eos_token_ids))
        except Exception as error:  # of any kind: the library raises bare ones
            raise ConstraintError(f"the model's tokenizer is not supported: {reason_of(str(error))}") from error
        self._token_lengths = token_lengths(self._tokenizer, vocab_size, self._eos_token_ids)
        self.grammar = functools.lru_cache(CACHED)(self._grammar)

    def _grammar(self, structure: Structure) -> Grammar:
        """Make the grammar of a structure. Raises StructureError with the library's reason."""
        has_lines = is_lark(structure)
        try:
            if has_lines:
                self._refuse_ends(structure.text)
            definition = definition_of(structure)
            return Grammar(self._tokenizer, definition, self._eos_token_ids, self._token_lengths, has_lines)
        except (ConstraintError, ValueError) as error:
            raise StructureError(structure, str(error)) from None

    def _refuse_ends(self, lark: str) -> None:
        """Raise ConstraintError for a grammar that names a token which ends the text, wherever it stands."""
        from llguidance import LLMatcher

        for token in named_tokens(lark):
            alone = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(f'start: {token} "a"'), log_level=0)
            mask = np.frombuffer(alone.compute_bitmask(), dtype=np.uint32)
            if not alone.is_error() and any(allows(mask, token_id) for token_id in self._eos_token_ids):
                raise ConstraintError(f"found {token}, which ends the text; expected none: it ends with the grammar")


def token_lengths(tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> np.ndarray:
    """The number of bytes of each token, `[vocab]`; 0 for an end, which comes where nothing else does."""
    sizes = [len(tokenizer.decode_bytes([token_id])) for token_id in range(vocab_size)]
    sizes = [0 if token_id in eos_token_ids else size for token_id, size in enumerate(sizes)]
    return np.array(sizes, dtype=np.int32)
