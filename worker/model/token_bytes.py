"""The bytes that single tokens stand for: a character may be parts of several tokens, so their texts do not do."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
SPACE = "\u2581"  # as sentencepiece writes it


class TokenBytes:
    """Those of one tokenizer of `transformers`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
        self._special |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}

    def is_special(self, token_id: int) -> bool:
        """Whether decoded texts are without it."""
        return token_id in self._special

    def of(self, token_id: int) -> bytes:
        """A token's bytes; none where the tokenizer has no such token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if name is None:
            return b""
        if "ByteLevel" in self._steps:
            known = all(letter in BYTE_OF for letter in name)
            return bytes(BYTE_OF[letter] for letter in name) if known else str(name).encode()
        if "ByteFallback" in self._steps and (found := BYTE.fullmatch(name)):
            return bytes([int(found[1], 16)])
        if self._steps & {"ByteFallback", "Metaspace"}:
            return str(name).replace(SPACE, " ").encode()
        return str(self._tokenizer.decode([token_id])).encode()

    @cached_property
    def _steps(self) -> set[str]:
        """How names of tokens become text, by the library's names for it."""
        decoder = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", None)
        if decoder is None:
            return set()
        said = json.loads(decoder.__getstate__())
        return {said["type"], *(step["type"] for step in said.get("decoders", ()))}


def _byte_of() -> dict[str, int]:
    """Byte-level vocabularies write bytes that are no visible character as those from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + number): byte for number, byte in enumerate(others)}


BYTE_OF = _byte_of()
