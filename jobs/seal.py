"""A JSON object that ends with the checksum of all that stands before it: a changed character is noticed."""

from __future__ import annotations

import hashlib

SEAL = b',"checksum":"'  # in no JSON string, where its quotation marks would be escaped


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
