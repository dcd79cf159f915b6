"""The n-gram table against a brute-force count; time and memory."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftbatch.worker.drafters.tokenswift.tokenswift import NgramTable

token_lists = st.lists(st.integers(0, 2), max_size=80)
Ranked = list[tuple[tuple[int, ...], int]]


def table_of(tokens: list[int], size: int = 4) -> NgramTable:
    table = NgramTable(size)
    table.extend(tokens)
    return table


def num_bytes(table: NgramTable) -> int:
    """Count tables and the tokens behind each n-gram's first; numbers are shared."""
    counts = table._counts.values()
    return sum(sys.getsizeof(each) + sum(map(sys.getsizeof, each)) for each in counts) + sys.getsizeof(table._counts)


def brute_force(tokens: list[int], size: int, first_token: int) -> Ranked:
    """Rank what followed `first_token` by count, then by the last place."""
    ngrams = [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]
    counts = Counter(ngrams)
    last = {ngram: start for start, ngram in enumerate(ngrams)}
    ranked = sorted(counts, key=lambda ngram: (counts[ngram], last[ngram]), reverse=True)
    return [(ngram[1:], counts[ngram]) for ngram in ranked if ngram[0] == first_token]


@settings(max_examples=75)
@given(token_lists, st.integers(2, 5), st.integers(0, 4))
def test_it_ranks_as_a_count_of_all_ngrams_does(tokens: list[int], size: int, k: int) -> None:
    table = table_of(tokens, size)
    for first_token in range(4):
        expected = brute_force(tokens, size, first_token)
        assert table.most_frequent(first_token, len(tokens)) == expected
        assert table.most_frequent(first_token, k) == expected[:k]


@settings(max_examples=50)
@given(st.lists(token_lists, max_size=8))
def test_pieces_give_the_table_that_all_tokens_at_once_give(pieces: list[list[int]]) -> None:
    by_pieces = NgramTable(4)
    for piece in pieces:
        by_pieces.extend(piece)
    at_once = table_of([token for piece in pieces for token in piece])
    assert len(by_pieces) == len(at_once)
    assert vars(by_pieces) == vars(at_once)


def test_it_agrees_with_the_count_in_a_longer_text() -> None:
    rng = random.Random(1)
    tokens = [min(rng.randrange(40), rng.randrange(40)) for _ in range(4000)]
    table = table_of(tokens)
    for first_token in range(40):
        assert table.most_frequent(first_token, 10_000) == brute_force(tokens, 4, first_token)


def test_the_more_frequent_comes_first_and_of_two_the_more_recent() -> None:
    table = table_of([7, 1, 1, 1, 7, 2, 2, 2, 7, 3, 3, 3, 7, 1, 1, 1])
    assert table.most_frequent(7, 9) == [((1, 1, 1), 2), ((3, 3, 3), 1), ((2, 2, 2), 1)]


def test_a_token_without_ngrams_gives_none() -> None:
    assert NgramTable(4).most_frequent(5, 20) == []
    table = table_of([5, 6, 7])
    assert len(table) == 3
    assert table.most_frequent(5, 20) == []


def streams(num_tokens: int) -> dict[str, list[int]]:
    rng = random.Random(1)
    return {
        "constant": [7] * num_tokens,
        "period": [i % 97 for i in range(num_tokens)],
        "text-like": [int(rng.paretovariate(0.7)) % 4096 for _ in range(num_tokens)],
        "random": [rng.randrange(100_000) for _ in range(num_tokens)],
        "one beginning": [token for _ in range(num_tokens // 2) for token in (0, rng.randrange(50_000))],
        "same counts": [token for i in range(num_tokens // 4) for token in (0, 1, 2, i % 500)],
    }


STREAMS = pytest.mark.parametrize("name", streams(0))


@STREAMS
def test_a_token_takes_no_more_memory_the_more_there_are(name: str) -> None:
    """A job of 100,000 tokens that hardly repeats itself has 23 MB of n-grams."""
    table = table_of(streams(20_000)[name])
    assert num_bytes(table) <= 400 * len(table)


@STREAMS
def test_a_token_costs_a_bounded_number_of_operations_whatever_was_seen_before(name: str) -> None:
    num_lines = 0

    def count_lines(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        nonlocal num_lines
        num_lines += event == "line"
        return count_lines

    tokens = streams(5_000)[name]
    table = NgramTable(4)
    tracer = sys.gettrace()
    sys.settrace(count_lines)
    try:
        table.extend(tokens)
    finally:
        sys.settrace(tracer)
    assert num_lines <= 80 * len(tokens)
