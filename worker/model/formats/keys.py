"""Reads the keys of a quantization config: what is not understood is refused by its name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from swiftbatch.worker.model.config_values import shown
from swiftbatch.worker.model.formats.contract import FormatError

NOTHING: tuple[Any, ...] = (None, False, {}, [], "")


def refuse_unknown(said: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise FormatError for a key that may decide what the weights stand for, unless it says nothing."""
    if strange := sorted(key for key, value in said.items() if key not in known and value not in NOTHING):
        raise FormatError(f"{where} has {shown(strange[0])} = {_short(said[strange[0]])}, which is not understood here")


def one_of(said: Mapping[str, Any], key: str, allowed: Collection[Any], where: str) -> Any:
    """A key's value, None where it is not there. Raises FormatError for a value that is not allowed."""
    value = said.get(key)
    if not any(value == each and type(value) is type(each) for each in allowed):
        expected = ", ".join(repr(each) for each in allowed if each is not None)
        raise FormatError(f"{where} has {key} = {_short(value)}; expected {expected}")
    return value


def positive(said: Mapping[str, Any], key: str, where: str) -> int:
    """A key's number. Raises FormatError for what is no positive integer."""
    value = said.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**31:
        raise FormatError(f"{where} has {key} = {_short(value)}; expected a positive integer")
    return value


def mapping(value: Any, where: str) -> Mapping[str, Any]:
    """Raises FormatError for what is no JSON object."""
    if not isinstance(value, dict):
        raise FormatError(f"{where} is {_short(value)}; expected an object")
    return value


def _short(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:60]}..."
