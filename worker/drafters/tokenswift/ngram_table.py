"""The n-grams of a growing output, ranked by frequency among those with the same first token (TokenSwift 3.2).

Every distinct n-gram is an entry. Entries with the same first token form a circular list, most frequent first, then
most recent; a sentinel of count 0 closes it. `_fronts` points to each run of equal counts, so counting again is one
move.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

_NONE = -1
_FIRST_BITS = 32  # bits of the first token in a key of `_fronts`; the count stands above them


class NgramTable:
    """Counts of the n-grams that begin with each token."""

    def __init__(self, size: int) -> None:
        """Count n-grams of `size` tokens. Raises ValueError for a size below 2."""
        if size < 2:
            raise ValueError(f"n-grams of {size} tokens: expected 2 or more")
        self._size = size
        self._tokens = array("i")
        self._starts = array("i")  # each n-gram's first position; -1 for a sentinel
        self._counts = array("i")
        self._next = array("i")  # links of the first token's list
        self._previous = array("i")
        self._chain = array("i")  # the next entry of the same bucket
        self._buckets = array("i", [_NONE]) * 64  # hash -> its first entry
        self._fronts: dict[int, int] = {}  # count and first token -> the most recent entry of that count

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Take the next tokens (integers from 0 to 2^31 - 1)."""
        for token_id in np.asarray(token_ids, dtype=np.int32).tolist():
            self._tokens.append(token_id)
            if len(self._tokens) >= self._size:
                self._count_newest(self._tokens[-self._size :])

    def most_frequent(self, first_token: int, k: int) -> list[tuple[tuple[int, ...], int]]:
        """Return at most `k` pairs (tokens after `first_token`, count), most frequent first, then newest first."""
        found: list[tuple[tuple[int, ...], int]] = []
        sentinel = self._fronts.get(first_token, _NONE)
        entry = self._next[sentinel] if sentinel != _NONE else _NONE
        while entry != sentinel and len(found) < k:
            start = self._starts[entry]
            found.append((tuple(self._tokens[start + 1 : start + self._size]), self._counts[entry]))
            entry = self._next[entry]
        return found

    def _count_newest(self, ngram: array[int]) -> None:
        first = ngram[0]
        entry = self._find(ngram)
        if entry == _NONE:
            sentinel = self._fronts.get(first, _NONE)
            if sentinel == _NONE:
                sentinel = self._fronts[first] = self._new_entry(_NONE)
                self._next[sentinel] = self._previous[sentinel] = sentinel
            entry = self._new_entry(len(self._tokens) - self._size)
            self._hash_in(entry, ngram)
            self._insert_before(entry, self._fronts.get(1 << _FIRST_BITS | first, sentinel))
        else:
            self._promote(entry, first)
        self._counts[entry] += 1
        self._fronts[self._counts[entry] << _FIRST_BITS | first] = entry

    def _promote(self, entry: int, first: int) -> None:
        """Increment an entry's count, and move the entry to the front of those with this count."""
        count = self._counts[entry]
        key = count << _FIRST_BITS | first
        front = self._fronts[key]
        target = self._fronts.get((count + 1) << _FIRST_BITS | first, front)
        following = self._next[entry]
        if front == entry:
            if self._counts[following] == count:
                self._fronts[key] = following
            else:
                del self._fronts[key]
        if target != entry:
            self._next[self._previous[entry]] = following
            self._previous[following] = self._previous[entry]
            self._insert_before(entry, target)

    def _insert_before(self, entry: int, target: int) -> None:
        before = self._previous[target]
        self._next[before] = self._previous[target] = entry
        self._previous[entry], self._next[entry] = before, target

    def _new_entry(self, start: int) -> int:
        self._starts.append(start)
        for part in (self._counts, self._next, self._previous):
            part.append(0)
        self._chain.append(_NONE)
        return len(self._starts) - 1

    def _find(self, ngram: array[int]) -> int:
        entry = self._buckets[hash(tuple(ngram)) & len(self._buckets) - 1]
        while entry != _NONE:
            start = self._starts[entry]
            if self._tokens[start : start + self._size] == ngram:
                return entry
            entry = self._chain[entry]
        return _NONE

    def _hash_in(self, entry: int, ngram: array[int]) -> None:
        """Put a new entry into its bucket; first double the number of buckets if entries outnumber the buckets."""
        if entry >= len(self._buckets):
            self._buckets = array("i", [_NONE]) * (2 * len(self._buckets))
            for other, start in enumerate(self._starts[:entry]):
                if start != _NONE:
                    self._chain_up(other, self._tokens[start : start + self._size])
        self._chain_up(entry, ngram)

    def _chain_up(self, entry: int, ngram: array[int]) -> None:
        bucket = hash(tuple(ngram)) & len(self._buckets) - 1
        self._chain[entry] = self._buckets[bucket]
        self._buckets[bucket] = entry
