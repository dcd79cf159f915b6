"""Bytes of single tokens, and their characters as soon as these are certain."""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import decoders

BYTE = re.compile(r"<0x(\+?[0-9A-Fa-f]{1,2})>")
NUM_LETTERS = len("<0x00>")
OF_TOKENS = ("Replace", "Metaspace", "WordPiece")  # these steps treat each token on its own


@dataclass(frozen=True)
class DecoderSteps:
    """Decoder whose text is the bytes of all tokens, except those stripped at the start."""

    name_text: Callable[[str, bool], str]  # maps a token's name, and whether it is the first, to its text
    text_bytes: Callable[[str], bytes]  # maps that text to bytes
    stripped: bytes
    num_stripped: int  # most bytes that are stripped at the start

    def bytes_of(self, name: str, is_first: bool) -> bytes:
        return self.text_bytes(self.name_text(name, is_first))


def steps_of(tokenizer: Any) -> DecoderSteps | None:
    """Return the steps of a `transformers` tokenizer, or None if the bytes of a token may depend on its neighbours."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not _is_plain(tokenizer):
        return None
    if backend.decoder is None:  # decoding joins names by spaces
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
    """Return whether the text is exactly what the library's decoder makes of the tokens."""
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
    """Return the byte stripped at the start, and how often; None for other steps."""
    num_fuse = next((i for i, step in enumerate(steps) if step["type"] != "Fuse"), len(steps))
    if num_fuse == len(steps):
        return b" ", 0
    last = steps[num_fuse]
    is_start = last["type"] == "Strip" and not last["stop"] and last["content"].isascii()
    if len(steps) > num_fuse + 1 or not is_start or not (is_one_text or num_fuse):
        return None
    return last["content"].encode(), last["start"]


def _name_text(steps: list[dict[str, Any]]) -> Callable[[str, bool], str] | None:
    """Return the library's own steps for one name, as the first token or not."""
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
    """Return the byte of each character of byte-level vocabularies, which write invisible bytes from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + number): byte for number, byte in enumerate(others)}


BYTE_OF = _byte_of()


class TokenBytes(dict[int, bytes]):
    """Bytes of each token within a text, cached; special and unknown tokens have none."""

    def __init__(self, tokenizer: Any, steps: DecoderSteps | None, shown: Collection[str] = ()) -> None:
        """Without `steps`, decode each token on its own. Texts show the special tokens `shown`, and no others."""
        super().__init__()
        self._tokenizer, self._steps = tokenizer, steps
        self._special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._hidden = self._special.difference(shown)

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = self.of(token_id) if self.is_in_text(token_id) else b""
        return self[token_id]

    def is_in_text(self, token_id: int) -> bool:
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        return name is not None and name not in self._hidden

    def of(self, token_id: int, is_first: bool = False) -> bytes:
        """Return a token's bytes, also of special ones, or no bytes for an unknown token."""
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if name is None:
            return b""
        if name in self._special:
            return str(name).encode()
        if self._steps is None:
            return str(self._tokenizer.decode([token_id])).encode()
        return self._steps.bytes_of(name, is_first)


# first two bytes of the first surrogate: no character starts with these, or with a larger second byte
SURROGATE = b"\xed\xa0"


def settled_characters(data: bytes) -> tuple[str, int]:
    """Return the characters of UTF-8 with `errors="replace"`, and how many bytes they are."""
    text, num_used = utf_8_decode(data, "replace", False)
    rest = data[num_used:]
    if len(rest) > 1 and rest[:1] == SURROGATE[:1] and rest >= SURROGATE:  # Python would wait for the third byte
        return text + rest.decode(errors="replace"), len(data)
    return text, num_used


def continues(pending: bytes, byte: bytes) -> bool:
    text, num_used = settled_characters(pending + byte)
    return num_used == 0 or (num_used == len(pending) + 1 and len(text) == 1)


class ByteStream:
    """Characters of pushed tokens, in batches of any size."""

    def __init__(self, tokens: TokenBytes, steps: DecoderSteps) -> None:
        self._tokens, self._steps = tokens, steps
        self._is_at_start, self._num_to_strip = True, steps.num_stripped
        self.pending = b""  # bytes of a character that later tokens may complete

    def push(self, token_id: int) -> str:
        """Add a token; return the characters that become certain."""
        data = self._first_bytes(token_id) if self._is_at_start or self._num_to_strip else self._tokens[token_id]
        return self._characters(data) if data else ""

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._characters(b"".join(self.parts(token_ids)))

    def parts(self, token_ids: Sequence[int]) -> list[bytes]:
        """Push tokens; return the bytes that each adds to the text, without pending ones."""
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
        """Return the bytes of a token at the text's start, without stripped ones."""
        if not self._tokens.is_in_text(token_id):
            return b""
        data = self._tokens.of(token_id, is_first=self._is_at_start)
        self._is_at_start = False
        while self._num_to_strip and data.startswith(self._steps.stripped):
            data, self._num_to_strip = data[1:], self._num_to_strip - 1
        if data:
            self._num_to_strip = 0
        return data
