"""Tries whether trees bring more than they cost: blocks of steps with and without them, timed as they are.

Costs of forwards say which tree is the best one. Whether it pays at all hangs on more where the gain is small: what
drafts do to the processor's caches, a machine that is faster than when costs were measured, its neighbours. So where
drafts promise little, both ways are tried for some steps, and the faster one stays until its rival is due again.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Literal

Way = Literal["plain", "tree"]
BLOCK_STEPS = 16
SETTLED = 2  # steps of a block before those that count
NUM_KEPT = 3  # blocks of each way, of which the fastest counts: whatever disturbs makes a block slower
MOST_AGE = 800  # tokens of each sequence after which a way is tried again
CLEAR = 1.3  # times the rate without drafts: a promise as large needs no trial
FAVOUR = 1.02  # factor on the rate of the way that drafts nothing


class Trial:
    """Times both ways from step to step: `way` says how the coming step goes, `count` takes in what it brought."""

    def __init__(self) -> None:
        self._rates: dict[Way, deque[float]] = {"plain": deque(maxlen=NUM_KEPT), "tree": deque(maxlen=NUM_KEPT)}
        self._tried_at: dict[Way, float] = {}  # in tokens of each sequence
        self._age = 0.0
        self._way: Way = "tree"
        self._is_trying = False
        self._num_sequences = 0
        self._begin_block()

    def way(self, gain: float, num_sequences: int) -> Way:
        """Choose how the coming step goes where trees promise `gain` times the rate without them."""
        self._end_step(num_sequences)
        if gain >= CLEAR:
            return self._go("tree", is_trying=False)
        if self._is_trying:
            return self._way
        rival = self._rival()
        return self._go(rival or self._faster(), is_trying=rival is not None)

    @property
    def is_trying(self) -> bool:
        """True if every step has to be timed."""
        return self._is_trying

    def count(self, num_tokens: int) -> None:
        """Add tokens that the step has brought."""
        self._num_tokens += num_tokens
        self._age += num_tokens / max(1, self._num_sequences)

    def leave(self) -> None:
        """End the trial: the coming steps are no part of it."""
        self._is_trying = False
        self._begin_block()

    def _go(self, way: Way, is_trying: bool) -> Way:
        if way != self._way or is_trying:
            self._begin_block()
        self._way, self._is_trying = way, is_trying
        return way

    def _begin_block(self) -> None:
        self._num_block_steps = 0
        self._num_tokens = 0
        self._started: float | None = None

    def _end_step(self, num_sequences: int) -> None:
        """Take the step before this one into the block; where all steps of it are done, keep its rate."""
        if num_sequences != self._num_sequences:
            self._begin_block()
        self._num_sequences = num_sequences
        self._num_block_steps += 1
        now = time.perf_counter()
        if self._num_block_steps <= SETTLED or self._started is None:
            self._started, self._num_tokens = now, 0
        elif self._num_block_steps > SETTLED + BLOCK_STEPS:
            self._rates[self._way].append(self._num_tokens / (now - self._started))
            self._tried_at[self._way] = self._age
            self._is_trying = False
            self._begin_block()

    def _rival(self) -> Way | None:
        """A way that is due to be tried."""
        for way in ("tree", "plain"):
            if self._age - self._tried_at.get(way, -MOST_AGE) >= MOST_AGE:
                return way
        return None

    def _faster(self) -> Way:
        plain, tree = (max(self._rates[way]) for way in ("plain", "tree"))
        return "tree" if tree > FAVOUR * plain else "plain"
