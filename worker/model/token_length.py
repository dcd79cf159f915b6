"""Tells how much text one token can stand for: a text far too long is then refused without being tokenized."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

COMPOSED = 4  # no character decomposes, canonically, into more characters: Unicode promises that it stays so
FACTORS = {"NFC": COMPOSED, "NFKC": COMPOSED, "NFD": 1, "NFKD": 1, "Prepend": 1, "ByteLevel": 1}
KEEPING = {"ByteLevel", "Metaspace", "Digits"}


def max_chars_per_token(tokenizer: Any) -> int | None:
    """The most characters of a text that come to one token; None where that has no bound, or none that is known.

    Only for byte pair encoding that knows every byte, and where nothing on the way to it can drop characters.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = json.loads(backend.to_str())
    factor = _factor(parts["normalizer"])
    added = parts["added_tokens"]
    takes_more = any(token["lstrip"] or token["rstrip"] for token in added)  # the whitespace around it, however long
    if factor is None or takes_more or not _keeps_all(parts["pre_tokenizer"]) or not _knows_all(parts):
        return None
    names = [*parts["model"]["vocab"], *(unicodedata.normalize("NFKD", token["content"]) for token in added)]
    return max(map(len, names)) * factor


def _factor(normalizer: Any) -> int | None:
    """The number of characters that become one at most; None where they may also vanish."""
    if normalizer is None:
        return 1
    if normalizer["type"] == "Sequence":
        factor: int | None = 1
        for part in normalizer["normalizers"]:
            one = _factor(part)
            factor = None if factor is None or one is None else factor * one
        return factor
    if normalizer["type"] == "Replace":
        found = normalizer["pattern"].get("String")
        return 1 if found is not None and len(found) <= len(normalizer["content"]) else None
    return FACTORS.get(normalizer["type"])


def _keeps_all(pre_tokenizer: Any) -> bool:
    if pre_tokenizer is None:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(_keeps_all(part) for part in pre_tokenizer["pretokenizers"])
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    return str(pre_tokenizer["type"]) in KEEPING


def _knows_all(parts: dict[str, Any]) -> bool:
    """Return whether each byte has a token: one that has none is dropped, or joined with its neighbours."""
    model = parts["model"]
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    if '"ByteLevel"' in json.dumps([parts["normalizer"], parts["pre_tokenizer"]]):
        return set(ByteLevel.alphabet()) <= set(model["vocab"])
    return bool(model["byte_fallback"]) and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
