"""Bytes as characters as they come, each as soon as it is sure: no byte to come can change it."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from swiftbatch.worker.texts.token_bytes import DecoderSteps, TokenBytes

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


class ByteStream:
    """A function of the tokens that were pushed, however many at once."""

    def __init__(self, tokens: TokenBytes, steps: DecoderSteps) -> None:
        self._tokens, self._steps = tokens, steps
        self._is_at_start, self._num_to_strip = True, steps.num_stripped
        self.pending = b""  # the first bytes of a character whose others may come

    def push(self, token_id: int) -> str:
        """Go on behind one more token; return the characters that are complete with it, or can no longer become so."""
        data = self._first_bytes(token_id) if self._is_at_start or self._num_to_strip else self._tokens[token_id]
        return self._characters(data) if data else ""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Push many tokens; return their characters."""
        return self._characters(b"".join(self.parts(token_ids)))

    def parts(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes that each of some tokens, which are pushed, adds to the text; nothing of them is pending then."""
        parts: list[bytes] = []
        while len(parts) < len(token_ids) and (self._is_at_start or self._num_to_strip):
            parts.append(self._first_bytes(token_ids[len(parts)]))
        tokens = self._tokens
        return parts + [tokens[token_id] for token_id in token_ids[len(parts) :]]

    def _characters(self, data: bytes) -> str:
        data = self.pending + data
        text, num_used = settled_characters(data)
        self.pending = data[num_used:]
        return text

    def _first_bytes(self, token_id: int) -> bytes:
        """The bytes of a token with which the text may begin, without what is left out there."""
        if not self._tokens.is_in_text(token_id):
            return b""
        data = self._tokens.of(token_id, is_first=self._is_at_start)
        self._is_at_start = False
        while self._num_to_strip and data.startswith(self._steps.stripped):
            data, self._num_to_strip = data[1:], self._num_to_strip - 1
        if data:
            self._num_to_strip = 0
        return data
