"""Structured output: `response_format` and `structured_outputs` of a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from swiftbatch.jobs.json_records import FieldError, Strict, is_utf8, shown

MAX_SCHEMA = 200_000  # characters of ASCII JSON
MAX_TEXT = 20_000  # characters of a regular expression or grammar
MAX_CHOICE_TEXT = 100_000  # characters of all choices as ASCII JSON
MAX_CHOICES = 2_000
SCHEMA_NAMES = ("name", "schema", "description", "strict")  # the fields of OpenAI's `json_schema`
FORMATS = ("text", "json_object", "json_schema")
# `format` values that are enforced; JSON Schema treats others as annotations
FOLLOWED_FORMATS = frozenset(
    ["date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"]
)
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # their values map names to schemas
DATA = ("const", "enum", "default", "examples", "example")  # their values are no schemas

Kind = Literal["json", "json_object", "regex", "choice", "grammar"]
KINDS: tuple[Kind, ...] = ("json", "json_object", "regex", "choice", "grammar")
# other options of vLLM's `structured_outputs`, with the values that ask for nothing
OTHER_OPTIONS: dict[str, tuple[Any, ...]] = {
    "structural_tag": (None,),
    "whitespace_pattern": (None,),
    "disable_fallback": (None, False),
    "disable_additional_properties": (None, False),
}
COMPACT = "disable_any_whitespace"  # vLLM's name
COMPACT_KINDS: tuple[Kind, ...] = ("json", "json_object")


class Structure(Strict):
    """A required structure; `text` is a JSON schema, choices as JSON, a regular expression, a grammar, or "".

    A schema keeps its order. Between the parts of `is_compact` JSON there is no white space.
    """

    kind: Kind
    text: str = Field(default="", max_length=MAX_SCHEMA)
    is_compact: bool = False

    def as_said(self) -> dict[str, Any]:
        """Return the object as a line has it, with a schema as text."""
        options = {COMPACT: True} if self.is_compact else {}
        if self.kind == "json_object":
            return {self.kind: True, **options}
        return {self.kind: json.loads(self.text) if self.kind == "choice" else self.text, **options}


def structure_of(value: object) -> Structure | None:
    """Parse `structured_outputs`; return None if it requires no structure. Raises FieldError."""
    if value is None or isinstance(value, Structure):
        return value
    if not isinstance(value, Mapping):
        raise FieldError("", f"found {shown(value)}, expected an object with one of: {', '.join(KINDS)}")
    for name in value.keys() - {*KINDS, COMPACT}:
        if name not in OTHER_OPTIONS:
            raise FieldError("", f"found {shown(name)}, expected one of: {', '.join((*KINDS, COMPACT))}")
        if value[name] not in OTHER_OPTIONS[name]:
            raise FieldError(name, f"found {shown(value[name])}, not supported; expected no such field")
    said = [kind for kind in KINDS if value.get(kind) is not None and (kind, value[kind]) != ("json_object", False)]
    if len(said) > 1:
        raise FieldError("", f"found {' and '.join(said)}, expected one of them")
    is_compact = _is_compact(value)
    if is_compact and not {*said}.intersection(COMPACT_KINDS):
        raise FieldError(COMPACT, f"found true, which is for {' and '.join(COMPACT_KINDS)}; expected no such field")
    return Structure(kind=said[0], text=_text_of(said[0], value[said[0]]), is_compact=is_compact) if said else None


def _is_compact(value: Mapping[str, Any]) -> bool:
    """Raise FieldError."""
    said = value.get(COMPACT)
    if said is not None and not isinstance(said, bool):
        raise FieldError(COMPACT, f"found {shown(said)}, expected true or false")
    return bool(said)


def format_of(value: object) -> Structure | None:
    """Parse OpenAI's `response_format`; return None if the format allows any text. Raises FieldError."""
    if value is None or isinstance(value, Structure):
        return value
    if not isinstance(value, Mapping):
        raise FieldError("", f"found {shown(value)}, expected an object with a type, one of: {', '.join(FORMATS)}")
    kind = value.get("type")
    if kind not in FORMATS:
        raise FieldError("type", f"found {shown(kind)}, expected one of: {', '.join(FORMATS)}")
    said = {name for name, each in value.items() if each is not None}
    unknown = sorted(said - {"type", COMPACT, *(["json_schema"] if kind == "json_schema" else [])})
    if unknown:
        raise FieldError(str(unknown[0]), f"found it with the type {shown(kind)}, expected no such field")
    is_compact = _is_compact(value)
    if is_compact and kind == "text":
        raise FieldError(COMPACT, 'found true with the type "text", expected a type of JSON, or no such field')
    if kind != "json_schema":
        return Structure(kind="json_object", is_compact=is_compact) if kind == "json_object" else None
    schema = value.get("json_schema")
    if not isinstance(schema, Mapping) or "schema" not in schema or not schema.keys() <= set(SCHEMA_NAMES):
        raise FieldError("json_schema", f"found {shown(schema)}, expected an object with name and schema")
    if not isinstance(schema["schema"], Mapping):
        raise FieldError("json_schema.schema", f"found {shown(schema['schema'])}, expected a JSON schema, an object")
    text = _json(schema["schema"], MAX_SCHEMA, "json_schema.schema")
    return Structure(kind="json", text=text, is_compact=is_compact)


def idle_formats(structure: Structure) -> list[str]:
    """List the `format` values of a schema that are not enforced."""
    if structure.kind != "json" or '"format"' not in structure.text:
        return []
    try:
        found, left = set[str](), [json.loads(structure.text)]
    except RecursionError:  # its grammar fails to compile, too
        return []
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            if isinstance(said := value.get("format"), str):
                found.add(said)
            for name, each in value.items():
                if name not in DATA:
                    left += each.values() if name in NAMED and isinstance(each, dict) else [each]
    return sorted(found - FOLLOWED_FORMATS)


def _text_of(kind: Kind, value: object) -> str:
    if kind == "json":
        return _schema(value)
    if kind == "json_object":
        if value is not True:
            raise FieldError(kind, f"found {shown(value)}, expected true or false")
        return ""
    if kind == "choice":
        return _choices(value)
    if not isinstance(value, str) or not value:
        raise FieldError(kind, f"found {shown(value)}, expected a string with at least 1 character")
    _check_writable(value, kind)
    return _within(MAX_TEXT, value, kind)


def _schema(value: object) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise FieldError("json", f"found {shown(value)}, expected a JSON schema") from None
    if not isinstance(value, Mapping):
        raise FieldError("json", f"found {shown(value)}, expected an object, or one as text")
    return _json(value, MAX_SCHEMA, "json")


def _choices(value: object) -> str:
    if not isinstance(value, list | tuple) or not value:
        raise FieldError("choice", f"found {shown(value)}, expected a list of at least 1 text")
    for number, each in enumerate(value):
        if not isinstance(each, str) or not each:
            raise FieldError(f"choice[{number}]", f"found {shown(each)}, expected a text with at least 1 character")
    if len(value) > MAX_CHOICES:
        raise FieldError("choice", f"found {len(value)} texts, expected at most {MAX_CHOICES}")
    return _json(list(dict.fromkeys(value)), MAX_CHOICE_TEXT, "choice")


def _within(most: int, text: str, name: str, unit: str = "characters") -> str:
    if len(text) > most:
        raise FieldError(name, f"found {len(text)} {unit}, expected at most {most}")
    return text


def _json(value: object, most: int, name: str) -> str:
    """Return the JSON text of a value. Raises FieldError beyond `most` characters."""
    try:
        written = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        text = json.dumps(value, separators=(",", ":"))
    except (ValueError, RecursionError):
        raise FieldError(name, f"found {shown(value)}, expected JSON that other programs can read") from None
    _check_writable(written, name)
    return _within(most, text, name, "characters of JSON in ASCII")


def _check_writable(text: str, name: str) -> None:
    """Raise FieldError for lone surrogates."""
    if not is_utf8(text):
        raise FieldError(name, f"found {shown(text)}, expected text that can be written as UTF-8")
