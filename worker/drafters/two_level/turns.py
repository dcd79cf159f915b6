"""Drafts by turns with none, where plain steps can pass by several at once.

What drafts promise follows from costs of single steps. Plain steps that pass in one call take less than those, so what
both really bring is measured, everything in between included: drafts are made only where they bring more.
"""

from __future__ import annotations

from collections.abc import Callable

from swiftbatch.worker.drafters.base import DraftRequest
from swiftbatch.worker.drafters.shared_budget import MUCH_LONGER, lengths_of, names_of
from swiftbatch.worker.target.clock import seconds_now

KEPT = 0.97  # share of what earlier steps count that stays with every step
SLOWEST = 4.0  # times the mean step: what held one up for longer says nothing of its kind
FEWEST = 16.0  # steps that tell of a rate, the older ones counting less

SETTLING = 4  # steps at the beginning of a turn that tell nothing
FIRST_TURN, TRIAL = 32, 16  # steps
DRAFTS_TRIAL = 64  # steps of a trial with drafts, unless it is far behind: tables of candidates fill only by drafts
NEAR = 0.9  # times the other way's rate
SHORTEST_TURN, LONGEST_TURN = 1024, 8192  # steps between trials
BETTER = 1.03  # times the tokens per second of the way that steps go


class TokenRate:
    """The tokens per second of a turn's steps; the newest count most."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._steps = 0.0

    def observe(self, num_tokens: int, seconds: float, num_steps: int = 1) -> None:
        """Take in steps that passed one behind the other."""
        if self._steps:
            seconds = min(seconds, SLOWEST * num_steps * self._seconds / self._steps)
        kept = KEPT**num_steps
        self._tokens = kept * self._tokens + num_tokens
        self._seconds = kept * self._seconds + seconds
        self._steps = kept * self._steps + num_steps

    @property
    def is_known(self) -> bool:
        """True once enough steps were seen that one that was held up counts little."""
        return self._steps > FEWEST

    @property
    def value(self) -> float:
        """Tokens per second; 0 before a step was seen."""
        return self._tokens / self._seconds if self._seconds else 0.0


class DraftTurns:
    """Says whether the coming steps may have drafts: the way that brings more, and now and then the other, as a trial.

    The first turn has none. Trials become rarer the longer one way stays the better one.
    """

    def __init__(self, clock: Callable[[], float] = seconds_now) -> None:
        self._clock = clock
        self.has_drafts = False  # in this turn
        self._prefers_drafts = False  # between trials
        self._turn, self._interval = FIRST_TURN, SHORTEST_TURN  # steps of this turn; of the next one between trials
        self._rates = {False: TokenRate(), True: TokenRate()}
        self._plain_before = 0.0  # rate of the last turn without drafts
        self._num_steps = 0  # of this turn
        self._names: list[str] = []  # of the newest step's sequences
        self._number, self._longest = 0, 0  # sequences, and the longest text of them, that the rates are for
        self._begun = 0.0

    def begin(self, requests: list[DraftRequest]) -> bool:
        """Begin the coming step, or several at once; return whether another turn begins with it."""
        names = names_of(requests)
        if names != self._names:
            self._meet(names, int(lengths_of(requests).max()))
        self._begun = self._clock()
        return self._num_steps >= self._turn and self._end_turn()

    @property
    def plain_rate(self) -> float | None:
        """The tokens per second of steps without drafts, of this turn or the last such one; None where unknown."""
        plain = self._rates[False]
        return (plain.value if plain.is_known else self._plain_before) or None

    def hear(self, num_tokens: int, num_steps: int, is_turns: bool = True) -> None:
        """Take in what passed since `begin`: steps that brought tokens of all sequences.

        `is_turns`: whether in this turn's way; a third way tells nothing of it.
        """
        if is_turns and self._num_steps > SETTLING:
            self._rates[self.has_drafts].observe(num_tokens, self._clock() - self._begun, num_steps)
        self._num_steps += num_steps

    def _meet(self, names: list[str], longest: int) -> None:
        """Measure anew where steps cost otherwise: many more or fewer sequences share them, or texts are longer."""
        if not (_are_alike(len(names), self._number) and _are_alike(longest, self._longest)):
            self._interval = SHORTEST_TURN
            self._turn = min(self._turn, self._num_steps + FIRST_TURN)
            self._number, self._longest = len(names), longest
            self._rates, self._plain_before = {False: TokenRate(), True: TokenRate()}, 0.0
        self._names = names

    def _end_turn(self) -> bool:
        """Begin the next turn; False where a trial of drafts is near enough to go on."""
        if self.has_drafts == self._prefers_drafts:
            self._begin(not self.has_drafts, TRIAL)
            return True
        tried, other = self._rates[self.has_drafts].value, self._rates[not self.has_drafts].value
        if not (tried and other):  # other sequences came in this trial
            self._begin(self._prefers_drafts, FIRST_TURN)
            return True
        if self.has_drafts and tried > NEAR * other and self._num_steps < DRAFTS_TRIAL:
            self._turn += TRIAL
            return False
        if tried > BETTER * other:
            self._prefers_drafts, self._interval = self.has_drafts, SHORTEST_TURN
            self._turn, self._num_steps = self._interval, SETTLING + 1
            return False
        self._begin(self._prefers_drafts, self._interval)
        self._interval = min(2 * self._interval, LONGEST_TURN)
        return True

    def _begin(self, has_drafts: bool, num_steps: int) -> None:
        self.has_drafts, self._turn, self._num_steps = has_drafts, num_steps, 0
        self._plain_before = self.plain_rate or 0.0
        self._rates[has_drafts] = TokenRate()


def _are_alike(number: int, before: int) -> bool:
    return number < MUCH_LONGER * before and before < MUCH_LONGER * number
