"""A prompt's words as they are spelled behind a quote, where their tokens differ from those behind a space."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np

from swiftbatch.worker.text.tokenizer import TextCodec

WORD = re.compile(r"\w\S*\w|\w")
MOST_READ = 16_384  # last tokens of a prompt: more take long


def spellings_in(codec: TextCodec, prompt_ids: list[int]) -> list[np.ndarray]:
    """Return the tokens of words that have no space before them, each with the first token of the word behind it."""
    words = WORD.findall(codec.decode(prompt_ids[-MOST_READ:]))
    unique = list(dict.fromkeys(words))
    plain = codec.encode_many([f"\n{word}" for word in unique], add_special_tokens=False)
    behind_space = codec.encode_many([f" {word}" for word in unique], add_special_tokens=False)
    spelled = {word: _end_of(codec, ids, word) for word, ids in zip(unique, plain, strict=True)}
    first = {word: ids[:1] for word, ids in zip(unique, behind_space, strict=True)}
    pairs = dict.fromkeys(pairwise(words))
    return [
        np.array([*spelled[word], *first[behind]], dtype=np.int64)
        for word, behind in pairs
        if spelled[word] and first[behind]
    ]


def _end_of(codec: TextCodec, token_ids: list[int], word: str) -> list[int]:
    """Return the last tokens that spell a word, or none if a token spells more than the word."""
    num_bytes = len(word.encode())
    for start in range(len(token_ids) - 1, -1, -1):
        num_bytes -= len(codec.token_bytes(token_ids[start]))
        if num_bytes <= 0:
            return token_ids[start:] if num_bytes == 0 else []
    return []
