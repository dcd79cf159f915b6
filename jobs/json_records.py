"""The strict, frozen bases of all records, JSON lines with checksums, and reasons why a record is refused."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from swiftbatch.jobs.errors import LineCode

Record = TypeVar("Record", bound=BaseModel)


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Strict(Frozen):
    """A record that rejects values of another type, because conversions would hide mistakes."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


def whole(value: Any) -> Any:
    """Return 8 for 8.0; other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_utf8(text: str) -> bool:
    """Return whether a text has no lone surrogate, which JSON may contain but UTF-8 can't."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def of_checked(kind: type[Record], values: dict[str, Any]) -> Record:
    """Make a record of values that are already checked and in order, several times faster than `model_construct`."""
    made = object.__new__(kind)
    object.__setattr__(made, "__dict__", values)
    object.__setattr__(made, "__pydantic_fields_set__", _names(kind))
    object.__setattr__(made, "__pydantic_extra__", None)
    object.__setattr__(made, "__pydantic_private__", None)
    return made


@functools.cache
def _names(kind: type[BaseModel]) -> set[str]:
    """Return all field names; frozen records can share the set."""
    return set(kind.model_fields)


# JSON lines as bytes; a checksum at the end reveals any changed character.


# some readers take these for line ends, some terminals for commands
NOT_TEXT = re.compile("[\x7f-\x9f\u2028\u2029]")
SEAL = b',"checksum":"'  # no JSON string contains it, because quotation marks are escaped there


def dump_line(value: dict[str, Any]) -> bytes:
    """Encode one JSON line. Raises `ValueError` for NaN and infinities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text = NOT_TEXT.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    # lone surrogates have no UTF-8 form
    return text.encode(errors="backslashreplace") + b"\n"


def sealed(text: bytes) -> bytes:
    """Append checksum and newline to a JSON object."""
    return text[:-1] + SEAL + hashlib.sha256(text).hexdigest().encode() + b'"}\n'


def unsealed(data: bytes) -> bytes | None:
    """Return the object without its checksum, or None if it has none. Raises ValueError if the checksum is wrong."""
    before, seal, _ = data.rpartition(SEAL)
    if not seal:
        return None
    text = before + b"}"
    if data != sealed(text):
        raise ValueError("found content that does not match its checksum")
    return text


# Reasons for users, from pydantic's errors: field, found, expected.


MAX_SHOWN = 60
MAX_REASONS = 5
KNOWN = ", expected one of: "

# pydantic's texts use Python's terms, these use JSON's
EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "string_unicode": "text that can be written as UTF-8",
    "bool_type": "true or false",
    "dict_type": "an object",
    "string_pattern_mismatch": "a text that is not blank",  # the only pattern of any field
}


CODES: dict[str, LineCode] = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}


class FieldError(ValueError):
    """An error in a field, named '' for the whole value."""

    def __init__(self, name: str, problem: str, code: LineCode = "invalid_value") -> None:
        super().__init__(problem)
        self.name, self.code = name, code


def list_of(items: str) -> Callable[[object], tuple[object, ...]]:
    """Return a converter of lists to tuples; its error expects `items`."""

    def as_tuple(value: object) -> tuple[object, ...]:
        if not isinstance(value, list | tuple):
            raise FieldError("", f"found {shown(value)}, expected {items}")
        return tuple(value)

    return as_tuple


def reasons(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """Join the errors of one validation; `prefix`, such as `body.`, precedes fields."""
    texts: list[str] = []
    for details in error.errors()[:MAX_REASONS]:
        reason, _, known = _reason(details, model, prefix).partition(KNOWN)
        is_said = any(text.endswith(KNOWN + known) for text in texts)  # say the long list of known values once
        texts.append(reason if is_said or not known else reason + KNOWN + known)
    if error.error_count() > MAX_REASONS:
        texts.append(f"and {error.error_count() - MAX_REASONS} more")
    return "; ".join(texts)


def code_of(error: ValidationError) -> LineCode:
    details = error.errors()[0]
    if details["type"] == "value_error":
        return getattr(details["ctx"]["error"], "code", "invalid_value")
    if details["type"].endswith("_type"):
        return "invalid_type"
    return CODES.get(details["type"], "invalid_value")


def shown(value: object) -> str:
    """Return a value as short, printable ASCII JSON."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    if len(text) <= MAX_SHOWN:
        return text
    length = f"{len(value)} characters" if isinstance(value, str) else f"{len(text)} characters of JSON"
    return f"{text[:MAX_SHOWN]}... ({length})"


def _reason(details: ErrorDetails, model: type[BaseModel], prefix: str) -> str:
    name = prefix + _dotted(details["loc"])
    if details["type"] == "value_error":
        problem = details["ctx"]["error"]
        if not isinstance(problem, FieldError):
            return str(problem)
        dot = "." if details["loc"] and problem.name and problem.name[0] != "[" else ""
        return f"field '{name}{dot}{problem.name}': {problem}"
    if details["type"] == "missing":
        return f"field '{name}': found nothing, expected a value"
    if details["type"] == "extra_forbidden":
        # the name comes from the file: as JSON it can't break the line
        known = _fields_at(model, details["loc"][:-1])
        near = get_close_matches(str(details["loc"][-1]), known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return f"unknown field {shown(name)}{hint}{KNOWN}{', '.join(known)}"
    found = f"field '{name}': found {shown(details['input'])}, expected "
    if details["type"] == "model_type":
        return f"{found}an object with some of: {', '.join(_fields_at(model, details['loc']))}"
    return found + _expected(details)


def _expected(details: ErrorDetails) -> str:
    kind = details["type"]
    if kind in EXPECTED:
        return EXPECTED[kind]
    if kind == "too_short":
        return f"at least {details['ctx']['min_length']} item(s)"
    if kind == "too_long":
        return f"at most {details['ctx']['max_length']} items, not {details['ctx']['actual_length']}"
    bound = "a value " if kind.startswith(("greater_than", "less_than")) else ""
    return bound + details["msg"].removeprefix("Input should be ").removeprefix("String should have ")


def _dotted(loc: tuple[int | str, ...]) -> str:
    """Return a field's path as `messages[0].role`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def _fields_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    for part in loc:
        if isinstance(part, str) and part in model.model_fields:
            model = next(_models_in(model.model_fields[part].annotation), model)
    return list(model.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def parse_sealed(data: bytes, model: type[Record]) -> Record:
    """Parse a record that `sealed` has written. Raises ValueError."""
    text = unsealed(data)
    if text is None:
        raise ValueError("found no checksum")
    return parse_record(text, model)


def parse_record(text: bytes, model: type[Record]) -> Record:
    """Parse a record's JSON. Raises ValueError with the reasons."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(reasons(error, model)) from None
