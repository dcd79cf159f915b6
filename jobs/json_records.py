"""The strict, frozen bases of all records, and JSON as bytes: one object a line, sealed with a checksum."""

from __future__ import annotations

import functools
import hashlib
import json
import re
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


# JSON as bytes, one object a line. A sealed one ends with its checksum: a changed character is noticed.


# line ends to some readers (Python's splitlines among them), or commands to terminals: JSON need not escape them
NOT_TEXT = re.compile("[\x7f-\x9f\u2028\u2029]")
SEAL = b',"checksum":"'  # in no JSON string, where its quotation marks would be escaped


def dump_line(value: dict[str, Any]) -> bytes:
    """One line of UTF-8 JSON, newline included. Raises `ValueError` for NaN and infinities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text = NOT_TEXT.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    # lone surrogates have no UTF-8 form
    return text.encode(errors="backslashreplace") + b"\n"


def sealed(text: bytes) -> bytes:
    """Add its checksum and a newline to a JSON object with something in it."""
    return text[:-1] + SEAL + hashlib.sha256(text).hexdigest().encode() + b'"}\n'


def unsealed(data: bytes) -> bytes | None:
    """Return the object as it was sealed; None where there is no checksum. Raises ValueError for another content."""
    before, seal, _ = data.rpartition(SEAL)
    if not seal:
        return None
    text = before + b"}"
    if data != sealed(text):
        raise ValueError("found content that does not match its checksum")
    return text
