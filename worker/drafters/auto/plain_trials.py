"""Drafts by turns with none, where plain steps can pass by several at once.

What drafts promise follows from costs of single steps. Plain steps that pass in one call take less than those, so what
both really bring is measured, everything in between included: drafts are made only where they bring more.

A machine with other work holds steps up, some for ten times as long as they take, and slows all of them down for a
while. So the median of like calls counts, drafts that seem to win are held against plain steps once more, before and
soon after they go on, and what was found out is kept for each number of sequences and length of text.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from swiftbatch.worker.drafters.drafter_interface import DraftRequest, Verified
from swiftbatch.worker.drafters.shared_budget import MUCH_LONGER, names_of
from swiftbatch.worker.forward.step_costs import seconds_now

NUM_TOLD = 256  # steps at a turn's end that tell of its rate
SETTLING = 4  # steps at the beginning of a turn that tell nothing
PLAIN_CALLS = 3  # behind these, in the first turn and in a trial without drafts
DRAFTS_TRIAL, MOST_TRIED = 16, 64  # steps of a trial with drafts; of one that is near: tables fill only by drafts
NEAR = 0.9  # times the rate without drafts
BETTER = 1.03  # times the rate without drafts: what brings less is not drafted
CLEARLY_BETTER = 2.0  # such rates: no need to see plain steps once more
PLAIN_PERIODS = (512, 2048, 4096, 8192)  # steps without drafts between trials, that drafts lose one by one
NO_PROMISE = 1  # where of these turns drafts go on that have lost a trial, and promise nothing either
DRAFTING_PERIODS = (64, 256, 1024, 4096, 8192)  # steps with drafts between trials of none


class Passed(NamedTuple):
    """The tokens, steps and drafts of one call of the target, of all sequences together."""

    num_tokens: int = 0
    num_steps: int = 1  # several where nothing was drafted
    num_draft_tokens: int = 0

    @property
    def kind(self) -> tuple[int, int]:
        """Calls of a kind take about as long."""
        return self.num_steps, self.num_draft_tokens.bit_length()


def passed_in(verified: Many[Verified]) -> Passed:
    """Add up what a call has brought."""
    num_tokens = sum(len(verification.committed_ids) for _, verification in verified)
    return Passed(num_tokens, num_steps_of(verified), sum(len(verification.tree) for _, verification in verified))


def num_steps_of(verified: Many[Verified]) -> int:
    """Return the steps that passed in one call."""
    return max((verification.num_steps for _, verification in verified), default=1)


class TokenRate:
    """The tokens per second of a turn's newest calls, as if nothing had held one up."""

    def __init__(self) -> None:
        self._calls = deque[tuple[Passed, float]](maxlen=NUM_TOLD)  # and their seconds
        self.num_calls = 0
        self._value: float | None = None  # None where a call has come since

    def observe(self, passed: Passed, seconds: float) -> None:
        """Take in a call."""
        self._calls.append((passed, seconds))
        self.num_calls += 1
        self._value = None

    @property
    def value(self) -> float:
        """Tokens per second; 0 before a call was seen. Kinds that were seen once count only where all were."""
        if self._value is None:
            self._value = self._found()
        return self._value

    def _found(self) -> float:
        by_kind = defaultdict[tuple[int, int], list[tuple[Passed, float]]](list)
        for passed, seconds in self._calls:
            by_kind[passed.kind].append((passed, seconds))
        kinds = [calls for calls in by_kind.values() if len(calls) > 1] or list(by_kind.values())
        num_tokens = sum(passed.num_tokens for calls in kinds for passed, _ in calls)
        seconds = sum(len(calls) * median_low(each for _, each in calls) for calls in kinds)
        return num_tokens / seconds if seconds else 0.0


@dataclass
class _Trials:
    """The turns of about so many sequences, whose longest text is about as long."""

    number: int
    longest: int
    has_drafts: bool = False  # in this turn
    prefers_drafts: bool = False  # between trials
    num_alike: int = -1  # trials in a row that changed nothing
    num_steps: int = 0  # of this turn
    rates: dict[bool, TokenRate] = field(default_factory=lambda: {False: TokenRate(), True: TokenRate()})
    plain_before: float = 0.0  # rate of the last turn without drafts
    most_steps: int | None = None  # of this turn; None: it ends when plain steps are known

    @property
    def is_over(self) -> bool:
        if self.most_steps is None:
            return self.rates[False].num_calls >= PLAIN_CALLS
        return self.num_steps >= self.most_steps

    @property
    def is_between_trials(self) -> bool:
        """Return whether a turn between trials has ended: texts that are longer than it by now may go on elsewhere."""
        return self.is_over and not self.is_trial and self.most_steps is not None

    @property
    def is_told(self) -> bool:
        """Return whether the coming step tells of this turn's rate: each that does takes its time."""
        return self.num_steps > SETTLING and (self.most_steps is None or self.num_steps + NUM_TOLD >= self.most_steps)

    @property
    def is_trial(self) -> bool:
        return self.has_drafts != self.prefers_drafts

    def fits(self, number: int, longest: int) -> bool:
        return _are_alike(number, self.number) and _are_alike(longest, self.longest)

    def begin(self, has_drafts: bool, most_steps: int | None) -> None:
        """Begin another turn."""
        if not self.has_drafts:
            self.plain_before = self.rates[False].value or self.plain_before
        self.has_drafts, self.num_steps, self.most_steps = has_drafts, 0, most_steps
        self.rates[has_drafts] = TokenRate()

    def go_on(self) -> None:
        """Begin the turn between trials, of the way that is the better one."""
        lengths = DRAFTING_PERIODS if self.prefers_drafts else PLAIN_PERIODS
        most_steps = lengths[min(max(0, self.num_alike), len(lengths) - 1)]
        if self.is_trial:
            self.begin(self.prefers_drafts, most_steps)
        else:
            self.most_steps, self.num_steps = most_steps, SETTLING + 1

    def end(self, are_promised: bool) -> None:
        """End this turn: with a trial, with what a trial has shown, or later, where that is not clear yet."""
        if not self.is_trial:
            self.begin(not self.has_drafts, None if self.has_drafts else DRAFTS_TRIAL)
            return
        plain, drafted = self.rates[False].value or self.plain_before, self.rates[True].value
        are_dropped = self.has_drafts and not are_promised
        if self.has_drafts and not are_dropped and drafted > NEAR * plain and self.num_steps < MOST_TRIED:
            self.most_steps = self.num_steps + DRAFTS_TRIAL
            return
        pays = not are_dropped and drafted > (1.0 if self.prefers_drafts and self.num_alike else BETTER) * plain
        is_same = pays == self.prefers_drafts
        self.prefers_drafts, self.num_alike = pays, self.num_alike + 1 if is_same else 0
        if are_dropped:
            self.num_alike = max(self.num_alike, NO_PROMISE)
        if not is_same and pays and drafted < CLEARLY_BETTER * plain:
            self.begin(has_drafts=False, most_steps=None)
        else:
            self.go_on()


class DraftTrials:
    """Says whether the coming steps may have drafts: the way that brings more, and now and then the other, as a trial.

    The first turn has none.
    """

    def __init__(self, clock: Callable[[], float] = seconds_now) -> None:
        self._clock = clock
        self._now = _Trials(0, 0)
        self._met: list[_Trials] = []
        self._names: list[str] = []  # of the newest step's sequences
        self._begun = 0.0

    @property
    def has_drafts(self) -> bool:
        """Return whether steps of this turn may have drafts."""
        return self._now.has_drafts

    @property
    def is_trial(self) -> bool:
        """Return whether this turn goes the other way than those between trials."""
        return self._now.is_trial

    @property
    def plain_rate(self) -> float | None:
        """The tokens per second of steps without drafts, of this turn or the last such one; None where unknown."""
        plain = self._now.rates[False]
        return (plain.value if plain.num_calls >= PLAIN_CALLS else self._now.plain_before) or None

    def begin(self, requests: list[DraftRequest], are_promised: bool = True) -> bool:
        """Begin the coming step, or several at once; return whether another turn begins with it.

        `are_promised`: whether drafts would be made now for what they promise, and not as a look alone.
        """
        before = self.has_drafts, self.is_trial
        names = names_of(requests)
        if names != self._names or self._now.is_between_trials:
            self._names = names
            self._meet(len(names), max(len(request.sequence) for request in requests))
        now = self._now
        if now.is_over or (now.has_drafts and now.is_trial and not are_promised):
            now.end(are_promised)
        self._begun = self._clock()
        return (now.has_drafts, now.is_trial) != before

    def go_on(self) -> bool:
        """Begin the coming step of the same sequences, if it is of this turn for sure; else call `begin`."""
        now = self._now
        if now.is_over or (now.has_drafts and now.is_trial):
            return False
        self._begun = self._clock()
        return True

    def hear(self, verified: Many[Verified], is_turns: bool = True) -> None:
        """Take in what has passed since `begin`.

        `is_turns`: whether in this turn's way; a third way tells nothing of it.
        """
        now = self._now
        if is_turns and now.is_told:
            now.rates[now.has_drafts].observe(passed_in(verified), self._clock() - self._begun)
        now.num_steps += num_steps_of(verified)

    def _meet(self, number: int, longest: int) -> None:
        """Go on where such sequences were; begin anew where there were none: steps cost otherwise."""
        if self._now.fits(number, longest):
            return
        known = [each for each in self._met if each.fits(number, longest)] or [_Trials(number, longest)]
        self._now = known[0]
        self._met = [self._now, *(each for each in self._met if each is not self._now)]


def _are_alike(number: int, before: int) -> bool:
    return number < MUCH_LONGER * before and before < MUCH_LONGER * number
