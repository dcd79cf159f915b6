"""JSON as bytes, one object a line. A sealed one ends with its checksum: a changed character is noticed."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

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
