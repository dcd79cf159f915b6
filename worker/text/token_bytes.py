"""The bytes that single tokens stand for, and these as characters as they come, each as soon as it is sure.

A character may be parts of several tokens, so their texts do not do.
"""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import decoders

BYTE = re.compile(r"<0x(\+?[0-9A-Fa-f]{1,2})>")
NUM_LETTERS = len("<0x00>")
OF_TOKENS = ("Replace", "Metaspace", "WordPiece")  # steps that make of each token a text, whatever the others are


@dataclass(frozen=True)
class DecoderSteps:
    """The bytes of all tokens together, without what is cut at their start, are those of the text."""

    name_text: Callable[[str, bool], str]  # (a token's name, whether it is the first) to its text
    text_bytes: Callable[[str], bytes]  # such a text to what it stands for
    stripped: bytes  # one byte
    num_stripped: int  # so many of these are left out at the start, if they are there

    def bytes_of(self, name: str, is_first: bool) -> bytes:
        """The bytes of the token with this name."""
        return self.text_bytes(self.name_text(name, is_first))


def steps_of(tokenizer: Any) -> DecoderSteps | None:
    """Find the steps of a tokenizer of `transformers`; None where they are not known to give each token its bytes.

    Its `decode` has to be the library's, and the library's decoder to have no steps but these, in this order: what
    makes a text of each token, then bytes of it, then one text of all, without spaces at its start.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not _is_plain(tokenizer):
        return None
    if backend.decoder is None:  # all names, with spaces between them
        return DecoderSteps(lambda name, is_first: name if is_first else f" {name}", str.encode, b" ", 0)
    steps = _flat(json.loads(backend.decoder.__getstate__()))
    num_head = next((i for i, step in enumerate(steps) if step["type"] not in OF_TOKENS), len(steps))
    name_text, rest = _name_text(steps[:num_head]), steps[num_head:]
    kind = rest[0]["type"] if rest else ""
    text_bytes = {"ByteLevel": _level_bytes, "ByteFallback": _fallback_bytes}.get(kind)
    start = _start(rest if text_bytes is None else rest[1:], is_one_text=kind == "ByteLevel")
    if name_text is None or start is None:
        return None
    return DecoderSteps(name_text, text_bytes or str.encode, *start)


def _is_plain(tokenizer: Any) -> bool:
    """Tell if the text of tokens is what the library's decoder makes of them, and nothing else."""
    from transformers import PreTrainedTokenizerFast

    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    if not issubclass(kind, plain) or kind.decode is not plain.decode or kind._decode is not plain._decode:
        return False
    return not tokenizer.clean_up_tokenization_spaces


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [each for part in step["decoders"] for each in _flat(part)]


def _start(steps: list[dict[str, Any]], is_one_text: bool) -> tuple[bytes, int] | None:
    """The byte that the last steps leave out at the start of the text, and how often; None where they do more."""
    num_fuse = next((i for i, step in enumerate(steps) if step["type"] != "Fuse"), len(steps))
    if num_fuse == len(steps):
        return b" ", 0
    last = steps[num_fuse]
    is_start = last["type"] == "Strip" and not last["stop"] and last["content"].isascii()
    if len(steps) > num_fuse + 1 or not is_start or not (is_one_text or num_fuse):
        return None
    return last["content"].encode(), last["start"]


def _name_text(steps: list[dict[str, Any]]) -> Callable[[str, bool], str] | None:
    """Apply the library's own steps to one name, behind another token or as the first."""
    if not steps:
        return lambda name, is_first: name
    decoder = decoders.Sequence([])
    decoder.__setstate__(json.dumps({"type": "Sequence", "decoders": steps}).encode())
    if decoder.decode([""]):
        return None
    return lambda name, is_first: str(decoder.decode([name] if is_first else ["", name]))


def _level_bytes(text: str) -> bytes:
    known = all(letter in BYTE_OF for letter in text)
    return bytes(BYTE_OF[letter] for letter in text) if known else text.encode()


def _fallback_bytes(text: str) -> bytes:
    found = BYTE.fullmatch(text) if len(text) == NUM_LETTERS else None
    return text.encode() if found is None else bytes([int(found[1], 16)])


def _byte_of() -> dict[str, int]:
    """Byte-level vocabularies write bytes that are no visible character as those from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + number): byte for number, byte in enumerate(others)}


BYTE_OF = _byte_of()


class TokenBytes(dict[int, bytes]):
    """The bytes of each token in the middle of a text, found once; special and unknown tokens have none."""

    def __init__(self, tokenizer: Any, steps: DecoderSteps | None) -> None:
        """`steps`: None where the tokenizer's decoder can't be said of single tokens; each is then decoded alone."""
        super().__init__()
        self._tokenizer, self._steps = tokenizer, steps
        self._special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = self.of(token_id) if self.is_in_text(token_id) else b""
        return self[token_id]

    def is_in_text(self, token_id: int) -> bool:
        """Tell if the tokenizer has this token and decoded texts show it."""
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        return name is not None and name not in self._special

    def of(self, token_id: int, is_first: bool = False) -> bytes:
        """A token's bytes, special ones too; none where the tokenizer has no such token."""
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if name is None:
            return b""
        if name in self._special:
            return str(name).encode()
        if self._steps is None:
            return str(self._tokenizer.decode([token_id])).encode()
        return self._steps.bytes_of(name, is_first)


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
