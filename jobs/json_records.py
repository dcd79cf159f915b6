"""The strict, frozen bases of all records, and JSON lines with checksums."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

Record = TypeVar("Record", bound=BaseModel)


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Strict(Frozen):
    """A record that rejects values of another type, because conversions would hide mistakes."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


def whole(value: Any) -> Any:
    """Return 8 for 8.0; other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
