"""A vocabulary of eight tokens, and grammars over it."""

from __future__ import annotations

from typing import Any

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from swiftbatch.jobs.structured_output import structure_of
from swiftbatch.worker.constraints.grammar import Grammar, definition_of
from swiftbatch.worker.sampling.token_masks import mask_of

WORDS = ("a", "b", "c", "d", "ab", "bc", "da")
END = len(WORDS)
VOCAB = END + 1


class Pieces:
    bos_token_id = None

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words, self.eos_token_id, self.special_token_ids = words, len(words), (len(words),)
        self.tokens = (*(word.encode() for word in words), b"</s>")

    def __call__(self, text: str | bytes) -> list[int]:
        return [self._words.index(letter) for letter in (text if isinstance(text, str) else text.decode())]


def grammar(words: tuple[str, ...] = WORDS, **structure: Any) -> Grammar:
    """Raises ConstraintError."""
    wrapped = LLTokenizer(TokenizerWrapper(Pieces(words)))
    given = structure_of(structure)
    return Grammar(wrapped, definition_of(given), frozenset({len(words)}), np.array([*map(len, words), 0]))


def allowed_behind(texts: set[str], text: str, words: tuple[str, ...] = WORDS) -> list[int]:
    """Return by definition the tokens after which a text can still come, and the end."""
    found = [i for i, word in enumerate(words) if any(each.startswith(text + word) for each in texts)]
    return found + [len(words)] * (text in texts)


def mask_behind(texts: set[str], token_ids: list[int]) -> np.ndarray:
    return mask_of(tuple(allowed_behind(texts, "".join(WORDS[i] for i in token_ids))), VOCAB)
