"""Checks the tools of a line, and its choice among them."""

from __future__ import annotations

import json
import re
from typing import Any

from swiftbatch.jobs.json_records import FieldError, shown

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
CHOICES = ("none", "auto", "required")  # of tools


def checked_tools(value: object) -> tuple[dict[str, Any], ...]:
    """Raise FieldError."""
    if not isinstance(value, list | tuple):
        raise FieldError("", f"found {shown(value)}, expected a list of tools")
    names: list[str] = []
    for number, tool in enumerate(value):
        function = _function_of(tool, f"[{number}]")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name) or name in names:
            expected = "expected 1 to 64 letters, digits, dots, '_' or '-', and no name twice"
            raise FieldError(f"[{number}].function.name", f"found {shown(name)}, {expected}")
        if parameters is not None and not isinstance(parameters, dict):
            problem = f"found {shown(parameters)}, expected a JSON schema, an object"
            raise FieldError(f"[{number}].function.parameters", problem)
        names.append(name)
    if not is_writable(*value):
        raise FieldError("", f"found {shown(value)}, expected JSON that other programs can read")
    return tuple({"type": "function", **tool} for tool in value)


def checked_choice(value: object) -> str:
    """Return one of CHOICES, or a function's name in brackets. Raises FieldError."""
    if isinstance(value, str) and value in CHOICES:
        return value
    name = _function_of(value, "").get("name")
    if not isinstance(name, str):
        raise FieldError("function.name", f"found {shown(name)}, expected the name of a tool")
    return f"({name})"


def _function_of(value: object, place: str) -> dict[str, Any]:
    """Return the function of a tool or of a choice. Raises FieldError."""
    function = (
        value.get("function") if isinstance(value, dict) and value.get("type", "function") == "function" else None
    )
    if not isinstance(function, dict):
        others = "" if place else f"one of {', '.join(CHOICES)}, or "
        raise FieldError(place, f"found {shown(value)}, expected {others}an object of type function, with a function")
    return function


def is_writable(*values: object) -> bool:
    """Return whether the values fit JSON and UTF-8."""
    try:
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True
