"""Structures in the grammar library's own form, and its words about those that can't be."""

from __future__ import annotations

import json
import re

from swiftbatch.jobs.structure import Structure
from swiftbatch.worker.constraints.schemas import kept_schema
from swiftbatch.worker.drawing.rules import ConstraintError

# between the parts of JSON: a blank, or a line end and an indent; a model that drifts into blanks would never come back
WHITESPACE = r"( |\r?\n[ \t]{0,32})?"
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
)
CONVERTING = "Failed to convert the grammar from GBNF to Lark: "


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
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})


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
