"""Texts of cached pieces have the library's tokens."""

from __future__ import annotations

import random

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from swiftbatch.worker.text import tokenizer_cache
from swiftbatch.worker.text.tokenizer_cache import PATTERNS, WordTokens, cuts_at_spaces
from tests import ROOT

SIGNS = [*" \n\t,.!'\"", "  ", "\r\n", " \n ", "'s ", "'LL", "\xa0", "\x1c", "\x85", "\u2028", "\u0301", " \u0301"]
WORDS = [
    "a",
    "the",
    "the ",
    " Word",
    "don't",
    "x,",
    "It) ",
    "12 ",
    "3",
    "e\u0301",
    "\xe9",
    "\u65e5\u672c",
    "<|endoftext|>",
]


def embedded() -> Tokenizer:
    return Tokenizer.from_file(str(ROOT / "worker" / "embedded" / "tokenizer.json"))


def with_pattern(pattern: str) -> Tokenizer:
    tokenizer = embedded()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return tokenizer


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_pieces_have_the_tokens_of_the_whole_text(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_cache, "MOST_WORDS", 2000)  # so that some are forgotten
    rng, tokenizer = random.Random(1), with_pattern(pattern)
    tokenizer.normalizer = normalizers.NFC()
    assert cuts_at_spaces(tokenizer)
    words = WordTokens(tokenizer)
    for adds in (True, False) * 4:
        texts = ["".join(rng.choices(SIGNS + WORDS, k=rng.randint(1, 9))) for _ in range(400)]
        texts.append("x" * 100 + " " + "y" * 100)
        expected = [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=adds)]
        assert words.encode(texts, adds) == expected


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": normalizers.NFKC()},
        {"normalizer": normalizers.Lowercase()},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(False, use_regex=False)},
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
        {"pre_tokenizer": None},
    ],
)
def test_a_tokenizer_that_may_join_words_is_left_to_the_library(part: dict[str, object]) -> None:
    tokenizer = embedded()
    assert cuts_at_spaces(tokenizer)
    [(name, value)] = part.items()
    setattr(tokenizer, name, value)
    assert not cuts_at_spaces(tokenizer)


def test_a_pattern_that_nobody_knows_a_cut_or_a_padding_is_left_to_the_library() -> None:
    assert not cuts_at_spaces(with_pattern(r"\p{L}+ \p{L}+|\s+"))
    for change in ("enable_truncation", "enable_padding"):
        tokenizer = embedded()
        getattr(tokenizer, change)(**({"max_length": 5} if change == "enable_truncation" else {}))
        assert not cuts_at_spaces(tokenizer)
