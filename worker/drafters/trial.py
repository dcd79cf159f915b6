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
TREE: Way = "tree"
BLOCK_STEPS = 16
SETTLED = 2  # steps of a block before those that count
MOST_TRYING = 4 * (SETTLED + BLOCK_STEPS)  # steps of a trial: where sequences come and go no block may be whole
NUM_KEPT = 3  # blocks of each way, of which the fastest counts: whatever disturbs makes a block slower
MOST_AGE = 800  # tokens of each sequence after which a way is tried again
CLEAR = 1.3  # times the rate without drafts: a promise as large needs no trial
FAVOUR = 1.04  # of the way that drafts nothing
LONGEST_STEP = 4.0  # times a promised plain step: one that took longer had something else beside it, a prompt perhaps


class Trial:
    """From step to step: `way` says how the coming one goes, `count` what it brought.

    Each block is measured against what the costs promised for it. So blocks of few sequences and of many, behind short
    texts and behind long ones, tell the same: how far the costs can be trusted.
    """

    def __init__(self) -> None:
        self._shares: dict[Way, deque[float]] = {"plain": deque(maxlen=NUM_KEPT), "tree": deque(maxlen=NUM_KEPT)}
        self._tried_at: dict[Way, float] = {}  # in tokens of each sequence
        self._age = 0.0
        self._way: Way = "tree"
        self._promised = 1.0  # tokens per second of the step under way, by the costs
        self._is_trying = False
        self._num_trying = 0  # steps of the trial so far
        self._num_sequences = 0
        self._most_seconds = 0.0  # that a step counts
        self._ended_at = 0.0  # the newest step
        self._begin_block()

    def way(self, gain: float, plain_rate: float, num_sequences: int) -> Way:
        """Choose how the coming step goes.

        The costs promise `plain_rate` tokens per second without trees, and `gain` times as many with them.
        """
        self._end_step(num_sequences)
        if gain >= CLEAR:
            way, is_trying = TREE, False
        elif self._is_trying:
            way, is_trying = self._way, True
        else:
            rival = self._rival()
            way, is_trying = rival or self._better(gain), rival is not None
        if way != self._way or (is_trying and not self._is_trying):
            self._begin_block()
            self._num_trying = 0
        self._way, self._is_trying = way, is_trying
        self._promised = plain_rate * (gain if way == "tree" else 1.0)
        self._most_seconds = LONGEST_STEP * num_sequences / plain_rate
        return way

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

    def _begin_block(self) -> None:
        self._num_block_steps = 0
        self._num_tokens = 0
        self._seconds = 0.0

    def _end_step(self, num_sequences: int) -> None:
        """Take the step before this one into the block; where all steps of it are done, keep its share."""
        if num_sequences != self._num_sequences:
            self._begin_block()
        self._num_sequences = num_sequences
        self._num_block_steps += 1
        self._num_trying += 1
        ended_at = time.perf_counter()
        if self._num_block_steps <= SETTLED:
            self._num_tokens = 0
        else:
            self._seconds += min(ended_at - self._ended_at, self._most_seconds)
        self._ended_at = ended_at
        if self._num_block_steps >= SETTLED + BLOCK_STEPS:
            self._shares[self._way].append(self._num_tokens / self._seconds / self._promised)
            self._end_trial()
        if self._is_trying and self._num_trying > MOST_TRYING:
            self._end_trial()

    def _end_trial(self) -> None:
        self._tried_at[self._way] = self._age
        self._is_trying = False
        self._begin_block()

    def _rival(self) -> Way | None:
        """A way that is due to be tried."""
        for way in ("tree", "plain"):
            if self._age - self._tried_at.get(way, -MOST_AGE) >= MOST_AGE:
                return way
        return None

    def _better(self, gain: float) -> Way:
        """The way that brings more by what both kept of their promises; by the promise alone where one is unknown."""
        if not (self._shares["plain"] and self._shares["tree"]):
            return "tree"
        plain, tree = (max(self._shares[way]) for way in ("plain", "tree"))
        return "tree" if gain * tree > FAVOUR * plain else "plain"
