"""Structured output: the tokens that a grammar, schema or regular expression allows next."""

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
from swiftbatch.worker.constraints.lenient_schema import Leniency, named_keywords
from swiftbatch.worker.sampling.token_masks import ConstraintError, allows, num_mask_words, tokens_of

if TYPE_CHECKING:
    from swiftbatch.worker.sampling.sequence import Sequence

# limited, because a model that drifts into blanks never returns
WHITESPACE = r"( |\r?\n[ \t]{0,32})?"
# without \u, since the library takes "\u0061" and "a" for different keys; a schema may still require it
ESCAPES = 'nrbtf\\"'
ESCAPED = re.compile(r"\\u00[01]|\x7f")
SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.?))", re.DOTALL)
# in Lark: strings, comments and patterns, which may contain a token's signs; and a token
QUOTED_OR_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/|(<[^<>\s]+>)')
PLACE = re.compile(r"^(?:at )?(\d+)\(\d+\): ")
RANGE = re.compile(r"Failed to generate regex for \w+ range: min=(?:Some\((.*?)\)|None), max=(?:Some\((.*?)\)|None)")
PLAIN_WORDS = (  # replaces the library's own terms
    (re.compile(r"NoExtensionBias"), "it allows no text"),
    (re.compile(r"lexer error: too many expressions constructed"), "a token may take too many steps"),
    (re.compile(r"Value for 'multipleOf' has too many digits: .*"), "found multipleOf with more than 9 digits in all"),
    (re.compile(r"exceed the maximum number of nested .*"), "nested too deeply, or a number with too many digits"),
    (re.compile(r"Expected f64 for"), "Expected a number for"),
    (
        re.compile(r"Resource '(.*?)' is not present .*"),
        r"found $ref to '\1', not supported; expected a reference within the schema",
    ),
    (
        re.compile(r"oneOf constraints are not supported\. .*"),
        "found oneOf with alternatives that the same value can match, not supported; expected anyOf, or alternatives "
        "that exclude each other, for example by a const",
    ),
)
NO_PATTERN = re.compile("look-around|backreferences")
UNKNOWN_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
CONVERTING = "Failed to convert the grammar from GBNF to Lark: "
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
LEAST = -(2**63) + 1  # lower bound of the library's ranges of whole numbers; its other numbers have no such bound
NO_SIGNS_ALONE = "^(?!^[-+.]*$)"  # start of pydantic's pattern for decimal numbers
# besides letters and digits, the characters of a JSON pointer that are legal in a URI
POINTER_CHARACTERS = "/~!$&'()*+,;=:@"


class StructureError(ConstraintError):
    """A structure cannot be followed. `reason` does not name the field."""

    def __init__(self, structure: Structure, reason: str) -> None:
        super().__init__(f"field 'structured_outputs.{structure.kind}': {reason}")
        self.reason = reason


def definition_of(structure: Structure) -> str:
    """Return a structure in the library's form. Raises ValueError if that is impossible."""
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
    options: dict[str, Any] = {"json_allowed_escapes": escapes}
    options |= {"whitespace_flexible": False} if structure.is_compact else {"whitespace_pattern": WHITESPACE}
    return LLMatcher.grammar_from_json_schema(schema, defaults=options)  # type: ignore[arg-type]


def unforced(definition: str) -> str:
    """Return the definition without forced tokens, so that any tokens may spell its texts."""
    lark = definition
    if definition.startswith("{"):  # never a start of Lark
        [only] = json.loads(definition)["grammars"]
        schema = only.get("json_schema")
        lark = only["lark_grammar"] if schema is None else f"start: %json {json.dumps(schema)}"
    return f'%llguidance {{"no_forcing": true}}\n{lark}'


def is_lark(structure: Structure) -> bool:
    """Return whether the structure is in Lark, so that the library's errors have the user's line numbers."""
    from llguidance.gbnf_to_lark import is_lark_syntax

    return structure.kind == "grammar" and is_lark_syntax(structure.text)


def reason_of(text: str, has_lines: bool = False) -> str:
    """Return the library's message in one line, with line numbers if `has_lines`."""
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
    """Return a numbered GBNF escape as its character, because the library drops zeros of its number."""
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
    """Return a schema that allows the same, or less for bounds between two float64.

    Raises ValueError, with the reason, if the library would allow more.
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
        rest = f"^{pattern.removeprefix(NO_SIGNS_ALONE)}"  # the library has no look-ahead
        kept |= {"pattern": rest, "allOf": [*others, {"pattern": "[^-+.]"}]}
    return kept


def _is_idle(name: str, value: Any) -> bool:
    """Return whether a keyword is only an annotation, since the library refuses unknown formats."""
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
    """Return a reference as a URI, since programs write names such as `List[int]` unescaped."""
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
    """Return the number, or the next float64 within the bound."""
    try:
        near = int(float(value))
    except OverflowError:
        return value
    if near == value or (near > value) == (inward > 0):
        return near
    return int(math.nextafter(near, inward))


def _check_value(value: Any) -> None:
    """Raise ValueError for a whole number that would be written as another."""
    if isinstance(value, list | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            _check_value(each)
    elif type(value) is int and (abs(value) >= 10**308 or Decimal(repr(float(value))) != value):
        raise ValueError(f"found the whole number {value}, expected one of at most 15 digits, or the number as text")


def _check_names(schema: Mapping[str, Any]) -> None:
    """Raise ValueError if `minProperties` needs two names outside `properties`, since a name may be repeated."""
    least, said = schema.get("minProperties"), schema.get("properties")
    is_open = schema.get("additionalProperties") is not False or "patternProperties" in schema
    num_said = len(said) if isinstance(said, Mapping) else 0
    if is_open and isinstance(least, int) and least > num_said + 1:
        raise ValueError(
            f"found minProperties {least}, expected at most {num_said + 1}: one more than there are `properties`"
        )


# Structured output by llguidance: tokens with which a text can still fit the grammar.

CACHED = 256

# above the library's defaults, because a choice among thousands is one row of items; fuel still bounds time
MAX_ROW_ITEMS, MAX_STEP_ITEMS, STEP_FUEL = 20_000, 500_000, 2_000_000
TRIED_FUEL, NUM_TRIED = 100_000, 16  # fuel per token when a grammar is checked, and the tokens to check


class Grammar:
    """`Rule` of a parsed structure over one model's tokens."""

    def __init__(
        self,
        tokenizer: Any,
        definition: str,
        eos_token_ids: frozenset[int],
        token_lengths: np.ndarray,
        has_lines: bool = False,
    ) -> None:
        """`token_lengths [vocab]` are in bytes, and 0 for tokens that end a text.

        Raises ConstraintError, with its reason, for an impossible grammar.
        """
        self.ignored: tuple[str, ...] = ()  # keywords of its schema that it does not hold
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
        return self._first.deep_copy()

    def rebuilt(self, token_ids: list[int]) -> Any:
        """Return an independent `LLMatcher` after some tokens."""
        matcher = self._built(self._definition)
        matcher.consume_tokens(token_ids)
        return matcher

    def mask(self, matcher: Any, token_ids: list[int]) -> np.ndarray:
        """Return the tokens allowed after `token_ids`, at the matcher's state.

        If only a special token's name is allowed, the library forces that token. It has no text, so tokens that spell
        the name are allowed instead.
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
        """Raise ConstraintError for a slow grammar, by the library's fuel, which is equal on all machines."""
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
    """Grammar after some tokens; nothing is restricted after an end-of-text token."""

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
        """Reset the library's caches, which count towards its limits."""
        self._matcher = self._grammar.rebuilt(self._token_ids)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(f"the grammar's state can't be told: {reason_of(self._matcher.get_error())}")


class GrammarTokenizer:
    """Model's tokens in llguidance, with a cache of grammars.

    With `is_lenient`, a schema's grammar leaves out the keywords that it cannot hold.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int], is_lenient: bool = False
    ) -> None:
        """Take a fast `transformers` tokenizer. Raises ConstraintError if its tokens have no known bytes."""
        from llguidance import LLTokenizer

        self._eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        if not self._eos_token_ids:
            raise ConstraintError("the model has no end-of-text token, so no text of a grammar would end")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        try:
            if backend is None:
                raise ValueError("it is none of the tokenizers library")
            self._tokenizer = LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=sorted(self._eos_token_ids))
        except Exception as error:  # the library raises bare exceptions
            raise ConstraintError(f"the model's tokenizer is not supported: {reason_of(str(error))}") from error
        self._token_lengths = token_lengths(self._tokenizer, vocab_size, self._eos_token_ids)
        self.grammar = functools.lru_cache(CACHED)(self._lenient if is_lenient else self._grammar)

    def _lenient(self, structure: Structure) -> Grammar:
        """Return a structure's grammar, without keywords that it cannot hold. Raises StructureError."""
        left, ignored = structure, set[str]()
        while True:
            try:
                grammar = self._grammar(left)
            except StructureError as error:
                leniency = Leniency(named_keywords(error.reason) if left.kind == "json" else set(), self._is_unheld)
                text = (
                    json.dumps(leniency.without(json.loads(left.text)), separators=(",", ":"))
                    if leniency.keywords
                    else ""
                )
                if not leniency.ignored:
                    raise
                left, ignored = left.model_copy(update={"text": text}), ignored | leniency.ignored
            else:
                grammar.ignored = tuple(sorted(ignored))
                return grammar

    def _is_unheld(self, schema: dict[str, Any]) -> bool:
        try:
            self._grammar(Structure(kind="json", text=json.dumps(schema)))
        except StructureError as error:
            return not schema.keys().isdisjoint(named_keywords(error.reason))
        return False

    def _grammar(self, structure: Structure) -> Grammar:
        """Return a structure's grammar. Raises StructureError with the library's reason."""
        has_lines = is_lark(structure)
        try:
            if has_lines:
                self._refuse_ends(structure.text)
            definition = definition_of(structure)
            return Grammar(self._tokenizer, definition, self._eos_token_ids, self._token_lengths, has_lines)
        except (ConstraintError, ValueError) as error:
            odd = NO_PATTERN.match(str(error)) if structure.kind == "json" else None
            reason = f"found pattern with {odd[0]}, not supported; expected one without" if odd else str(error)
            raise StructureError(structure, reason) from None

    def _refuse_ends(self, lark: str) -> None:
        """Refuse a grammar that names a token for the text's end. Raises ConstraintError."""
        from llguidance import LLMatcher

        for token in dict.fromkeys(found[1] for found in QUOTED_OR_TOKEN.finditer(lark) if found[1]):
            alone = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(f'start: {token} "a"'), log_level=0)
            mask = np.frombuffer(alone.compute_bitmask(), dtype=np.uint32)
            if not alone.is_error() and any(allows(mask, token_id) for token_id in self._eos_token_ids):
                raise ConstraintError(f"found {token}, which ends the text; expected none: it ends with the grammar")


def token_lengths(tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> np.ndarray:
    """Return the number of each token's bytes, `[vocab]`. Tokens that end a text have 0."""
    sizes = [len(tokenizer.decode_bytes([token_id])) for token_id in range(vocab_size)]
    sizes = [0 if token_id in eos_token_ids else size for token_id, size in enumerate(sizes)]
    return np.array(sizes, dtype=np.int32)
