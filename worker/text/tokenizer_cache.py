"""Token ids of texts from a cache of words, since the library encodes repeated words at full cost.

This is exact for tokenizers that `cuts_at_spaces` knows: their patterns cut there before they merge bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WORD = r"""[ \n]?[A-Za-z]+(?=[ \n,.;:!?")]|\Z)"""
PIECE = re.compile(rf"{WORD}|\s*\S+(?:[^\S ]\s*\S+)*(?:[^\S ]\s*)?|\s+")
MOST_WORDS = 2**17
LONGEST_WORD = 64  # longer pieces are not cached
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = frozenset(
    [
        rf"{CONTRACTIONS}|\p{{N}}|{ENDS}",  # Qwen
        rf"{CONTRACTIONS}|\p{{N}}{{1,3}}|{ENDS}",  # Llama 3
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        r"'(?:s|t|re|ve|m|ll|d)\b| ?\p{L}+| ?\p{N}|\n+| ?[^\s\p{L}\p{N}]+|[^\S\n]+",  # the embedded model
    ]
)


def cuts_at_spaces(tokenizer: Tokenizer) -> bool:
    """Return whether a text's tokens are known to be those of its pieces."""
    model = tokenizer.model
    names = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    merges_bytes_alone = type(model).__name__ == "BPE" and not any(getattr(model, name) for name in names)
    if not merges_bytes_alone or tokenizer.truncation is not None or tokenizer.padding is not None:
        return False
    steps = _steps(_form(tokenizer.pre_tokenizer))
    is_cut = any(_cuts(step) for step in steps) and all(_cuts(step) or _keeps_cuts(step) for step in steps)
    return is_cut and _form(tokenizer.normalizer) in (None, {"type": "NFC"})


def _form(part: Any) -> dict[str, Any] | None:
    """Return a tokenizer's part as in `tokenizer.json`, without the vocabulary."""
    return None if part is None else json.loads(part.__getstate__())


def _steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    if step is None:
        return []
    parts = step["pretokenizers"] if step["type"] == "Sequence" else None
    return [step] if parts is None else [each for part in parts for each in _steps(part)]


def _cuts(step: dict[str, Any]) -> bool:
    if step["type"] == "ByteLevel":
        return bool(step["use_regex"]) and not step["add_prefix_space"]
    is_whole = step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]
    return is_whole and step["pattern"].get("Regex") in PATTERNS


def _keeps_cuts(step: dict[str, Any]) -> bool:
    return step["type"] == "Digits" or (step["type"] == "ByteLevel" and not step["add_prefix_space"])


class WordTokens:
    """Encodes texts with a tokenizer that `cuts_at_spaces`, and caches words."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        # texts with these characters may have added tokens
        self._first_of_added = {content[0] for content in added if content}
        self._known: dict[str, list[int]] = {}
        self._around = {adds: self._tokens_around(adds) for adds in (True, False)}

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        pieces = [None if any(map(text.__contains__, self._first_of_added)) else PIECE.findall(text) for text in texts]
        known = self._of_pieces({piece for own in pieces if own is not None for piece in own})
        whole = [text for text, own in zip(texts, pieces, strict=True) if own is None]
        others = iter(self._tokenizer.encode_batch_fast(whole, add_special_tokens=add_special_tokens))
        before, behind = self._around[add_special_tokens]
        return [
            next(others).ids if own is None else [*before, *chain.from_iterable(map(known.__getitem__, own)), *behind]
            for own in pieces
        ]

    def _of_pieces(self, pieces: set[str]) -> dict[str, list[int]]:
        """Return the tokens of pieces. The result may have more pieces."""
        if len(self._known) + len(pieces) > MOST_WORDS:
            self._known = {}
        new = list(pieces - self._known.keys())
        encoded = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        found = {piece: each.ids for piece, each in zip(new, encoded, strict=True)}
        self._known.update((piece, ids) for piece, ids in found.items() if len(piece) <= LONGEST_WORD)
        is_all_kept = all(len(piece) <= LONGEST_WORD for piece in new)
        return self._known if is_all_kept else self._known | found

    def _tokens_around(self, add_special_tokens: bool) -> tuple[list[int], list[int]]:
        bare, whole = (self._tokenizer.encode("a", add_special_tokens=adds).ids for adds in (False, add_special_tokens))
        start = next(n for n in range(len(whole)) if whole[n : n + len(bare)] == bare)
        return whole[:start], whole[start + len(bare) :]
