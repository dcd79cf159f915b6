"""Distinct-n: how little a text repeats itself (Li et al. 2016; TokenSwift, section 4 and tables 6 and 8)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

LARGEST_N = 4  # as in TokenSwift's tables


def distinct_n(token_ids: np.ndarray, n: int) -> float:
    """Distinct n-grams over all n-grams of `token_ids [num_tokens]`, 0 to 1; 0 where there are fewer than n tokens.

    Raises ValueError where n is not positive.
    """
    if n < 1:
        raise ValueError(f"distinct-{n}: expected n of 1 or more")
    return list(_shares(token_ids, n))[-1]


def distinct(token_ids: np.ndarray) -> dict[str, float]:
    """Distinct-1 to Distinct-4 of `token_ids [num_tokens]` as `distinct_1`, ..., rounded to four places."""
    return {f"distinct_{n}": round(share, 4) for n, share in enumerate(_shares(token_ids, LARGEST_N), start=1)}


def _shares(token_ids: np.ndarray, largest_n: int) -> Iterator[float]:
    """Distinct-1, Distinct-2, ...: an n-gram is numbered by the number of its first n - 1 tokens and its last token."""
    kinds, numbers = np.unique(token_ids, return_inverse=True)
    num_tokens, num_kinds = len(numbers), len(kinds)
    tokens = numbers.astype(np.int64)
    num_distinct = num_kinds
    for n in range(1, largest_n + 1):
        if num_tokens < n:
            yield 0.0
            continue
        if n > 1:
            ngrams, numbers = np.unique(numbers[:-1] * num_kinds + tokens[n - 1 :], return_inverse=True)
            num_distinct = len(ngrams)
        yield num_distinct / (num_tokens - n + 1)
