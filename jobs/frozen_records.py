"""The bases of all records that are read or kept: none has a field that is not its own, and none changes."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

Record = TypeVar("Record", bound=BaseModel)


class Frozen(BaseModel):
    """A record of ours."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Strict(Frozen):
    """Converts nothing: "5" and true are no whole numbers. A silent conversion would hide a mistake."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


def whole(value: Any) -> Any:
    """8 of 8.0, which is the same number in JSON; any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def of_checked(kind: type[Record], values: dict[str, Any]) -> Record:
    """A record of values for all its fields, in their order, which were checked elsewhere: a million are made so.

    `model_construct` and `model_copy` would take a multiple of the time.
    """
    made = object.__new__(kind)
    object.__setattr__(made, "__dict__", values)
    object.__setattr__(made, "__pydantic_fields_set__", _names(kind))
    object.__setattr__(made, "__pydantic_extra__", None)
    object.__setattr__(made, "__pydantic_private__", None)
    return made


@functools.cache
def _names(kind: type[BaseModel]) -> set[str]:
    """All fields, in one set for all records: nothing sets a field of one that is frozen, and copies have their own."""
    return set(kind.model_fields)
