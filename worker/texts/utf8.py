"""Bytes as characters, as far as no byte to come can change them."""

from __future__ import annotations

from codecs import utf_8_decode

SURROGATE = b"\xed\xa0"  # the first two bytes of the first surrogate: no character begins so, or with a larger second


def settled_characters(data: bytes) -> tuple[str, int]:
    """The characters of UTF-8 as `errors="replace"` has them, and how many bytes they are.

    The others are at most three: the first bytes of a character whose others may come.
    """
    text, num_used = utf_8_decode(data, "replace", False)
    rest = data[num_used:]
    if len(rest) > 1 and rest[:1] == SURROGATE[:1] and rest >= SURROGATE:  # Python waits for the third byte
        return text + rest.decode(errors="replace"), len(data)
    return text, num_used


def continues(pending: bytes, byte: bytes) -> bool:
    """Tell if a byte belongs to the character whose first bytes are pending."""
    text, num_used = settled_characters(pending + byte)
    return num_used == 0 or (num_used == len(pending) + 1 and len(text) == 1)
