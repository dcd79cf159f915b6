"""Turn pydantic's errors into reasons a user can act on: the field, what was found, what was expected."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

MAX_SHOWN = 60
MAX_REASONS = 5
KNOWN = ", expected one of: "

# pydantic's own words speak of Python; these speak of JSON
EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "string_unicode": "text that can be written as UTF-8",
    "bool_type": "true or false",
    "dict_type": "an object",
    "string_pattern_mismatch": "a text that is not blank",  # the one pattern that fields have
}


class FieldError(ValueError):
    """An error in a field: its name in what is validated ('' for all of it), what was found, and what was expected."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(problem)
        self.name = name


def list_of(items: str) -> Callable[[object], tuple[object, ...]]:
    """Return what makes a tuple of a list, and says of anything else that it expected `items` ("a list of texts")."""

    def as_tuple(value: object) -> tuple[object, ...]:
        if not isinstance(value, list | tuple):
            raise FieldError("", f"found {shown(value)}, expected {items}")
        return tuple(value)

    return as_tuple


def reasons(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """The errors of one validation by `model` in one line; `prefix` goes before field names, as in `body.`."""
    texts: list[str] = []
    for details in error.errors()[:MAX_REASONS]:
        reason, _, known = _reason(details, model, prefix).partition(KNOWN)
        is_said = any(text.endswith(KNOWN + known) for text in texts)  # the list of known values is long: say it once
        texts.append(reason if is_said or not known else reason + KNOWN + known)
    if error.error_count() > MAX_REASONS:
        texts.append(f"and {error.error_count() - MAX_REASONS} more")
    return "; ".join(texts)


def shown(value: object) -> str:
    """A found value as short ASCII JSON, safe to print whatever the file held; of long ones also how long they are."""
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
        # the name comes from the file: shown as JSON it can't break the line
        return f"unknown field {shown(name)}{KNOWN}{', '.join(_fields_at(model, details['loc'][:-1]))}"
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
    """`messages[0].role`"""
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
