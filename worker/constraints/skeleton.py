"""What the texts of one rule have alike: their tokens around free text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from swiftbatch.worker.sampling.token_masks import allows

FREE, FORCED = -1, -2  # stand for any token of free text, and for any token that was the only one allowed
FEWEST_FREE = 1024  # allowed tokens of a place with free text; structure with blanks of any length has some hundreds
LONGEST_CONTEXT, LONGEST_SHAPE = 8, 4  # tokens
MOST_CONTEXTS = 1 << 14  # of a skeleton, which then begins anew
MOST_COUNTED = 3  # repeats and misses
FIXED_PRIOR, FREE_PRIOR = 0.8, 0.4  # shares of guesses that come true: in fixed places, and at the end of free text
PRIOR_STEPS, LEARNING_RATE = 8, 0.02  # of these shares


def num_tokens_in(mask: np.ndarray | None) -> int:
    """Return the number of allowed tokens; many if all are."""
    return FEWEST_FREE if mask is None else int(np.bitwise_count(mask).sum())


class TextPlace(NamedTuple):
    """Place of a text's next token: what stands before it, and how many tokens are allowed."""

    context: tuple[int, ...] = ()  # the last tokens; each free text counts as one `FREE`
    shape: tuple[int, ...] = ()  # fewer of them, with `FORCED` for each that was
    num_allowed: int = FEWEST_FREE
    num_free: int = 0  # tokens of the free text that may go on here

    @property
    def is_fixed(self) -> bool:
        return self.num_allowed < FEWEST_FREE

    def behind(self, token_id: int, num_allowed: int) -> TextPlace:
        """Return the next place. The last token of a free text belongs to its context."""
        if not self.is_fixed and num_allowed >= FEWEST_FREE:
            return self._replace(num_free=self.num_free + 1)
        free = (FREE,) if self.num_free else ()
        context = (*self.context, *free, token_id)
        shape = (*self.shape, *free, FORCED if self.num_allowed == 1 else token_id)
        return TextPlace(context[-LONGEST_CONTEXT:], shape[-LONGEST_SHAPE:], num_allowed)

    def contexts(self) -> Iterator[tuple[int, ...]]:
        """Yield what places are found by: contexts, the longest first, then shapes."""
        for start in range(len(self.context)):
            yield self.num_free, *self.context[start:]
        for start in range(len(self.shape)):
            if FORCED in (shape := self.shape[start:]):
                yield self.num_free, *shape


class Guess(NamedTuple):
    """Token that probably comes next."""

    token_id: int
    share: float  # probability


class Known(NamedTuple):
    """Token that came last behind a context."""

    token_id: int
    num_repeats: int = 0  # times in a row that it came again
    num_misses: int = 0  # times that another token came before

    def then(self, token_id: int) -> Known:
        if token_id == self.token_id:
            return self._replace(num_repeats=self.num_repeats + 1)
        return Known(token_id, 0, self.num_misses + 1)


class Skeleton:
    """Tokens that came behind the contexts of one rule's texts."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Known] = {}
        self._shares: dict[tuple[bool, int, int], tuple[float, int]] = {}  # kind of guesses -> share, number of them

    def guess(self, place: TextPlace, mask: np.ndarray) -> Guess | None:
        """Return the allowed token that came behind the longest known context, or None if free text goes on."""
        for key in place.contexts():
            if (known := self._known.get(key)) is None:
                continue
            if known.token_id == FREE:
                return None
            if allows(mask, known.token_id):
                return Guess(known.token_id, self._share(place, known)[0])
        return None

    def learn(self, place: TextPlace, token_id: int) -> None:
        """Learn which token came in a place, or that it was one of free text."""
        if len(self._known) > MOST_CONTEXTS:
            self._known.clear()
        is_first = True
        for key in place.contexts():
            known = self._known.get(key)
            if known is not None and is_first:  # by this context, the place is guessed
                is_first = False
                self._judge(place, known, token_id)
            self._known[key] = Known(token_id) if known is None else known.then(token_id)

    def _judge(self, place: TextPlace, known: Known, token_id: int) -> None:
        if known.token_id != FREE:
            share, number = self._share(place, known)
            rate = max(LEARNING_RATE, 1 / (PRIOR_STEPS + number + 1))
            self._shares[_kind(place, known)] = share + rate * ((token_id == known.token_id) - share), number + 1

    def _share(self, place: TextPlace, known: Known) -> tuple[float, int]:
        fixed, num_repeats, num_misses = kind = _kind(place, known)
        prior = (num_repeats + (FIXED_PRIOR if fixed else FREE_PRIOR)) / (num_repeats + num_misses + 1)
        return self._shares.get(kind, (prior, 0))


def _kind(place: TextPlace, known: Known) -> tuple[bool, int, int]:
    return place.is_fixed, min(known.num_repeats, MOST_COUNTED), min(known.num_misses, MOST_COUNTED)
