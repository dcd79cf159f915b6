"""Follows a text that repeats itself: an n-gram table finds where its end stood before, and how long repeats last.

Every token tells whether the repeat under way went on, whoever drafted it or nobody. So what a chain from there would
bring is known before one is drafted.
"""

from __future__ import annotations

import functools
import operator
from itertools import accumulate

import numpy as np

from swiftbatch.worker.drawing.sequence import Sequence

NGRAM = 4  # tokens that begin a repeat
FACTORS = (1_000_003, 1_618_033_989, 2_147_483_629, 1_414_213_573)  # sums of four stay below 2**63
MOST_TOLD_APART = 32  # matched tokens
PRIORS = (0.5, 0.7, 0.85, 0.92)  # shares that go on behind 4, 8, 16 and 32 matched tokens, before any was seen
LEARNING_RATE = 0.02
PRIOR_STEPS = 8  # that a prior counts for


class RepeatShares:
    """The running shares of tokens that a repeat went on with, by how many it had matched before."""

    def __init__(self) -> None:
        self._shares = list(PRIORS)
        self._num_seen = [0] * len(PRIORS)

    def observe(self, num_matched: int, goes_on: bool) -> None:
        """Learn from one token behind `num_matched` matched ones."""
        level = _level(num_matched)
        self._num_seen[level] += 1
        rate = max(LEARNING_RATE, 1.0 / (PRIOR_STEPS + self._num_seen[level]))
        self._shares[level] += rate * (goes_on - self._shares[level])

    def tokens(self, num_matched: int, choices: tuple[int, ...]) -> list[float]:
        """The tokens that chains of so many nodes bring in a step, the bonus token included."""
        levels = (_level(num_matched + i) for i in range(max(choices)))
        reached = accumulate((self._shares[level] for level in levels), lambda path, share: path * share, initial=1.0)
        brought = list(accumulate(reached))
        return [brought[nodes] for nodes in choices]


def _level(num_matched: int) -> int:
    """The index into `PRIORS`."""
    return min(num_matched, MOST_TOLD_APART).bit_length() - NGRAM.bit_length()


class RepeatedText:
    """One sequence: the newest place behind every n-gram, and the place that its end agrees with."""

    def __init__(self, sequence: Sequence, shares: RepeatShares) -> None:
        """Index what is there; `shares` may belong to several sequences."""
        self._shares = shares
        self._places = np.zeros(2 * sequence.max_length + 1, dtype=np.int32)  # behind an n-gram, by its bucket; 0: none
        self._num_buckets = len(self._places)
        self._num_tokens = len(sequence)
        self.num_matched = 0  # tokens that the end agrees with; 0: it repeats nothing
        self._source = 0  # the place that the next token would be repeated from
        self._ngram: list[int] = sequence.token_ids[-NGRAM:].tolist()  # the last tokens
        self._index(sequence.token_ids)
        if len(sequence) >= NGRAM:
            bucket = self._bucket(self._ngram)
            self._begin(sequence.token_ids, len(sequence), self._ngram, int(self._places[bucket]))
            self._places[bucket] = len(sequence)

    @property
    def num_told_apart(self) -> int:
        """The matched tokens as far as they make a difference."""
        return min(self.num_matched, MOST_TOLD_APART)

    def catch_up(self, sequence: Sequence) -> None:
        """Follow the repeat over the tokens that came since the last call."""
        token_ids, end = sequence.token_ids, self._num_tokens
        ngram = self._ngram  # a step of every sequence waits: arrays would take longer
        for token_id in token_ids[end:].tolist():
            if self.num_matched:
                self._follow(token_ids.item(self._source) == token_id)
            end += 1
            ngram = [*ngram[-NGRAM + 1 :], token_id]
            if end < NGRAM:
                continue
            bucket = self._bucket(ngram)
            if not self.num_matched and (place := self._places.item(bucket)):
                self._begin(token_ids, end, ngram, place)
            self._places[bucket] = end
        self._num_tokens, self._ngram = end, ngram

    def tokens(self, choices: tuple[int, ...]) -> list[float]:
        """The tokens that chains of so many nodes bring in a step; 1 where the text repeats nothing."""
        return self._shares.tokens(self.num_matched, choices) if self.num_matched else [1.0] * len(choices)

    def chain(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """The tokens that follow if the repeat goes on; one that overlaps itself goes on from what it repeated."""
        period = len(sequence) - self._source
        offsets = np.arange(num_tokens) % period
        found: list[int] = sequence.token_ids[self._source + offsets].tolist()
        return found

    def _follow(self, goes_on: bool) -> None:
        self._shares.observe(self.num_matched, goes_on)
        if goes_on:
            self._source, self.num_matched = self._source + 1, self.num_matched + 1
        else:
            self.num_matched = 0

    def _begin(self, token_ids: np.ndarray, end: int, ngram: list[int], place: int) -> None:
        """Begin a repeat where the newest earlier place of its bucket has `ngram`, the tokens up to `end`, in front."""
        if not NGRAM <= place < end or token_ids[place - NGRAM : place].tolist() != ngram:
            return  # another n-gram may have the same bucket
        most, self._source = min(place, MOST_TOLD_APART), place
        earlier, ending = token_ids[place - most : place].tolist(), token_ids[end - most : end].tolist()
        self.num_matched = NGRAM
        while self.num_matched < most and earlier[-self.num_matched - 1] == ending[-self.num_matched - 1]:
            self.num_matched += 1

    def _index(self, token_ids: np.ndarray) -> None:
        """Keep the newest place of every n-gram but that of the end, which `_begin` looks for first."""
        if (num_ngrams := len(token_ids) - NGRAM) > 0:  # term by term: a window on each n-gram takes five times as long
            terms = (token_ids[i : i + num_ngrams] * factor for i, factor in enumerate(FACTORS))
            self._places[functools.reduce(operator.iadd, terms) % len(self._places)] = np.arange(NGRAM, len(token_ids))

    def _bucket(self, ngram: list[int]) -> int:
        a, b, c, d = FACTORS
        return (ngram[0] * a + ngram[1] * b + ngram[2] * c + ngram[3] * d) % self._num_buckets
