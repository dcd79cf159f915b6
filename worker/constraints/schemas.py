"""JSON schemas as the grammar library can keep them: it has numbers as float64, and counts names that come twice."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
LEAST = -(2**63) + 1  # below it the library knows no range of whole numbers; of others it knows none so long
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # names, each with a schema
DATA = ("default", "examples", "example")  # values that say nothing of the text


def kept_schema(text: str) -> str:
    """A schema that lets come what this one does, or less where a bound lies between two float64.

    Raises ValueError, with the reason, where the library would let come what does not fit.
    """
    try:
        return json.dumps(_schema(json.loads(text)), separators=(",", ":"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _schema(value: Any) -> Any:
    if isinstance(value, list):
        return [_schema(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    _check_names(value)
    return {name: _keyword(name, each) for name, each in value.items()}


def _keyword(name: str, value: Any) -> Any:
    if name in NAMED and isinstance(value, Mapping):
        return {each: _schema(schema) for each, schema in value.items()}
    if name in ("const", "enum"):
        _check_value(value)
    if name in ("const", "enum", *DATA):
        return value
    if name in LOWER and type(value) in (int, float) and value < LEAST:
        value = LEAST
    if name in LOWER + UPPER and type(value) is int:
        return _bound(value, math.inf if name in LOWER else -math.inf)
    return _schema(value)


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
