"""The policy of drafting: it measures the tokens per second of each way to draft, and takes the fastest.

Another way is tried now and then. The more tokens a trial lost, the later comes the next one.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from swiftbatch.worker.drafters.drafter_interface import DraftRequest

PLAIN = "plain"  # the way without drafts
NUM_KEPT = 64  # newest calls that tell the rate of a way
FEWEST_BLOCKS, NUM_BLOCKS, MOST_BLOCKS = 2, 4, 8  # per trial, each with calls of the other way and of the best one
CALLS_OF_A_BLOCK = 4
STEPS_PER_TRIAL_CALL, FEWEST_STEPS = 16, 4  # plain steps: one call is a block
TRIAL_SECONDS = 0.01  # of a block's plain steps: fewer steps are enough where each takes long
SETTLING = 1  # calls with drafts at the beginning of a block, slower since the processor's caches hold other data
HOPELESS, WORSE, BETTER, CLEARLY_BETTER = 0.8, 0.85, 1.03, 1.15  # times the rate of the best way
MUCH_FASTER = 1.25  # times the rate of the best way, as another one was measured: the best one became slower
LOOK_EVERY = 512  # tokens of each sequence, until that is looked at
PAYBACK = 400  # tokens between trials for each token that a trial may lose
FIRST_PAYBACK = 35  # tokens between trials for each token that the last one lost; they double with every lost trial
SHORTEST_INTERVAL, LONGEST_INTERVAL = 64, 8192  # tokens of each sequence between trials
MOST_DOUBLED = 7  # times that the shortest interval is doubled
SURELY_BETTER = 1.6  # times plain decoding, as promised: a way that begins without any measurement
UNCERTAIN_SECONDS = 1e-3  # of a step: what drafts take beside forwards is a guess then, and counts in short steps
SURELY_TRIED = 1.1  # times the best rate, as promised: a way that is tried soon
TRIED_AT_ONCE = 1.4  # times plain decoding, both as promised: a way that is then tried at once
FIRST_TRIAL = 192  # tokens of each sequence, until a way is tried that promises no more than that: a trial may lose 2 %
UNMEASURED_GAIN = 1.2  # times plain decoding, for a way that cannot promise anything
MUCH_LONGER = 1.5  # times the text of other sequences: rates measured for them do not count
SHORT = 1024  # positions that hardly count in a step's time
NUM_TIMES, FEWEST_TIMES = 15, 3  # newest times that tell what a step takes beside its forward
MOST_UNKNOWN = 16  # newest calls that a rate leaves out: to find it anew takes a fifth of a short step
MOST_HELD_UP = 1.5  # times the median of like calls
DRAFTING_SECONDS = 0.2e-3  # prior of drafts' time beside forwards
MOST_BESIDE = 9  # times the seconds of a forward


class StepCall(NamedTuple):
    """The numbers of tokens, steps and draft tokens of one call of the target, summed over sequences."""

    num_tokens: int
    num_steps: int  # several where nothing was drafted
    num_draft_tokens: int

    @property
    def kind(self) -> tuple[int, int]:
        """A key for the call's duration: calls with the same key take about equally long."""
        return self.num_steps, self.num_draft_tokens.bit_length()


class TokenRate:
    """The tokens per second of the latest calls, with the time of delayed calls capped."""

    def __init__(self, before: TokenRate | None = None) -> None:
        self._calls: deque[tuple[StepCall, float]] = deque(before._calls if before else (), maxlen=NUM_KEPT)
        self.num_calls = len(self._calls)
        self._value, self._num_known = 0.0, 0  # and the calls that it was found by

    def observe(self, call: StepCall, seconds: float) -> None:
        self._calls.append((call, seconds))
        self.num_calls += 1

    @property
    def value(self) -> float:
        """Return the tokens per second, which may not yet include the latest few calls; 0 before the first call."""
        if self.num_calls - self._num_known > min(self._num_known // 4, MOST_UNKNOWN):
            self._num_known = self.num_calls
            by_kind = defaultdict[tuple[int, int], list[tuple[int, float]]](list)
            for call, seconds in self._calls:
                by_kind[call.kind].append((call.num_tokens, seconds))
            kinds = [calls for calls in by_kind.values() if len(calls) > 1] or list(by_kind.values())
            num_tokens = sum(number for calls in kinds for number, _ in calls)
            seconds = sum(_undisturbed([each for _, each in calls]) for calls in kinds)
            self._value = num_tokens / seconds if seconds else 0.0
        return self._value


def _undisturbed(seconds: list[float]) -> float:
    """Return the total seconds of calls of one kind; a call counts for at most `MOST_HELD_UP` times the median."""
    most = MOST_HELD_UP * statistics.median_low(seconds)
    return sum(min(each, most) for each in seconds)


class StepTimes:
    """The seconds that steps of each way take outside their forwards: drafting, learning, a busy machine."""

    def __init__(self) -> None:
        self._beside: dict[str, deque[float]] = {}

    def observe(self, way: str, seconds: float, expected: float) -> None:
        """Record a step's `seconds`; `expected` is the estimate for its forwards."""
        kept = self._beside.setdefault(way, deque(maxlen=NUM_TIMES))
        kept.append(min(seconds - expected, MOST_BESIDE * expected))

    def is_known(self, way: str) -> bool:
        return len(self._beside.get(way, ())) >= FEWEST_TIMES

    def beside(self, way: str, otherwise: float) -> float:
        """Return the median seconds; if the way is unknown, estimate them from plain steps or from `otherwise`."""
        if self.is_known(way):
            return statistics.median(self._beside[way])
        known = [statistics.median(self._beside[name]) for name in self._beside if self.is_known(name)]
        least = min(known, default=otherwise)
        return least if way == PLAIN else max(0.0, least) + DRAFTING_SECONDS


@dataclass
class BestTurn:
    """Consecutive calls that go the best way."""

    most_tokens: int
    num_tokens: int = 0


@dataclass
class WayTrial:
    """A comparison of another way to draft with the best way so far.

    Blocks of calls alternate, so that a slower machine slows both ways alike.
    """

    way: str
    best: str
    rates: dict[bool, TokenRate]  # True: the other way's rate; False: the best one's; both with earlier trials
    is_trying: bool = True  # the coming call goes the other way
    num_blocks: int = 0  # ended blocks
    num_calls: int = 0  # calls of the block's half
    num_tokens: int = 0  # tokens of the other way, with settling
    seconds: float = 0.0

    @property
    def newest(self) -> str:
        return self.way if self.is_trying else self.best

    @property
    def ratio(self) -> float:
        """Return the other way's rate / the best way's rate."""
        best = self.rates[False].value
        return self.rates[True].value / best if best else 1.0

    @property
    def is_over(self) -> bool:
        if self.num_calls or not self.is_trying or not self.num_blocks:
            return False
        if not HOPELESS < self.ratio < 1 / HOPELESS:
            return self.num_blocks >= FEWEST_BLOCKS
        return self.num_blocks >= (MOST_BLOCKS if WORSE < self.ratio < CLEARLY_BETTER else NUM_BLOCKS)

    def observe(self, call: StepCall, seconds: float) -> None:
        self.num_calls += 1
        is_plain = self.newest == PLAIN
        if self.is_trying:
            self.num_tokens, self.seconds = self.num_tokens + call.num_tokens, self.seconds + seconds
        if is_plain or self.num_calls > SETTLING:
            self.rates[self.is_trying].observe(call, seconds)
        if is_plain or self.num_calls == SETTLING + CALLS_OF_A_BLOCK:
            self.num_blocks += not self.is_trying
            self.is_trying, self.num_calls = not self.is_trying, 0


@dataclass
class Place:
    """Measurements for about `number` sequences, the longest of about `longest` positions."""

    number: int
    longest: int
    best: str = ""
    num_tokens: int = 0
    rate: TokenRate = field(default_factory=TokenRate)  # the best way's rate
    trials: dict[str, dict[bool, TokenRate]] = field(default_factory=dict)  # other ways' rates beside the best one's
    others: dict[str, float] = field(default_factory=dict)  # tokens per second of other ways, when they were tried
    due: dict[str, int] = field(default_factory=dict)  # the `num_tokens` at which a way is tried
    num_lost: dict[str, int] = field(default_factory=dict)  # trials in a row

    def fits(self, number: int, longest: int) -> bool:
        return _are_alike(number, self.number) and _are_alike(longest + SHORT, self.longest + SHORT)

    def measured(self, way: str) -> float:
        """Return the tokens per second of a way, or 0 if it was not tried."""
        return self.rate.value if way == self.best else self.others.get(way, 0.0)

    def take(self, way: str, rate: TokenRate) -> None:
        """Make another way the best one."""
        before, trial = self.best, self.trials.pop(way, None)
        self.trials.clear()
        if before:
            self.others[before] = self.rate.value
        if before and trial is not None:
            self.trials[before] = {True: trial[False], False: trial[True]}
        self.best, self.rate = way, rate
        self.others.pop(way, None)

    def put_off(self, way: str, num_tokens: float) -> None:
        """Schedule a way's next trial after `num_tokens`, clipped; the lower bound doubles with every lost trial."""
        least = SHORTEST_INTERVAL * self.number << self.num_lost.get(way, 0)
        self.due[way] = self.num_tokens + int(min(max(least, num_tokens), LONGEST_INTERVAL * self.number))

    def is_due(self, way: str, value: float, plain: float) -> bool:
        """Return whether a way that should bring `value` tokens per second is tried now; plain steps: `plain`."""
        if way not in self.due and value > SURELY_TRIED * self.rate.value:
            is_sure = self.best != PLAIN or value > TRIED_AT_ONCE * plain
            self.due[way] = self.num_tokens if is_sure else max(self.num_tokens, FIRST_TRIAL * self.number)
        elif way not in self.due and way == PLAIN:  # its promise knows nothing of runs
            self.put_off(way, 0 if self.rate.value < SURELY_BETTER * value else LOOK_EVERY * self.number)
        elif way not in self.due:
            lost = max(0.0, self.number * NUM_BLOCKS * CALLS_OF_A_BLOCK * (self.rate.value / value - 1))
            self.put_off(way, LOOK_EVERY * self.number + PAYBACK * lost)
        is_faster = self.others.get(way, 0.0) > MUCH_FASTER * self.rate.value
        return is_faster or self.num_tokens + FEWEST_STEPS * self.number >= self.due[way]


class Policy:
    """Chooses the way of each call."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self._places: list[Place] = []
        self._place = Place(0, 0)
        self._turn: BestTurn | WayTrial | None = None  # None: the place is new
        self._names: list[str] = []  # the newest call's sequences
        self._promised = 0.0  # tokens per second of the best way
        self._plain_seconds = 0.0  # of a plain step, as promised; 0: nothing was
        self._gains: dict[str, float] = {}  # a way without promises -> its rate / the rate of plain decoding

    def choose(self, requests: list[DraftRequest], promises: Callable[[], dict[str, float | None]]) -> str:
        """Return the way of the coming call.

        `promises` returns each way's expected tokens per second: 0 if the way can draft nothing now, None if only a
        trial can tell.
        """
        names = [request.sequence.sequence_id for request in requests]
        is_over = self._is_over
        if is_over or names != self._names:
            self._names = names
            self._meet(len(names), max(len(request.sequence) for request in requests))
        if is_over or self._turn is None:
            promised = promises()
            self._plain_seconds = self._place.number / (promised[PLAIN] or 1.0)
            self._turn = self._next_turn(self._values(promised))
        return self._way

    def observe(self, way: str, call: StepCall, seconds: float, expected: float | None) -> None:
        """Record a call; its forwards should take `expected` seconds per step.

        A call that went another way than the turn's way does not count for the turn.
        """
        if expected is not None:
            self.times.observe(way, seconds / call.num_steps, expected)
        turn, place = self._turn, self._place
        if turn is None or way != self._way:
            return
        place.num_tokens += call.num_tokens
        if isinstance(turn, WayTrial):
            turn.observe(call, seconds)
        else:
            turn.num_tokens += call.num_tokens
            place.rate.observe(call, seconds)

    @property
    def rate(self) -> float:
        """Return the tokens per second of the best way: measured, or expected before it is measured."""
        return self._place.rate.value or self._promised

    @property
    def most_steps(self) -> int:
        """Return how many plain steps one call may take in this turn."""
        turn = self._turn
        if isinstance(turn, BestTurn) and self._place.rate.num_calls:
            return max(1, (turn.most_tokens - turn.num_tokens) // self._place.number)
        return self._steps_per_trial_call

    def num_tokens_to_trial(self, way: str) -> int:
        """Return how many tokens each sequence gets until the way is tried."""
        if isinstance(self._turn, WayTrial) and self._turn.way == way:
            return 0
        place = self._place
        return (place.due.get(way, place.num_tokens) - place.num_tokens) // max(1, place.number)

    @property
    def _steps_per_trial_call(self) -> int:
        if not self._plain_seconds:
            return STEPS_PER_TRIAL_CALL
        return max(FEWEST_STEPS, min(STEPS_PER_TRIAL_CALL, int(TRIAL_SECONDS / self._plain_seconds)))

    @property
    def _way(self) -> str:
        return self._turn.newest if isinstance(self._turn, WayTrial) else self._place.best

    @property
    def _is_over(self) -> bool:
        turn = self._turn
        return turn is None or (turn.is_over if isinstance(turn, WayTrial) else turn.num_tokens >= turn.most_tokens)

    def _next_turn(self, values: dict[str, float]) -> BestTurn | WayTrial:
        """End the turn and begin another. `values` has the tokens per second of every way that can draft now."""
        place, turn = self._place, self._turn
        if isinstance(turn, WayTrial):
            self._judge(turn)
        if place.best not in values:
            place.take(self._first(values), TokenRate())
        self._promised = values[place.best]
        if not place.rate.value:
            return BestTurn(place.number * (2 if place.best == PLAIN else 1) * self._steps_per_trial_call)
        plain = place.number / self._plain_seconds
        due = [way for way in values if way != place.best and place.is_due(way, values[way], plain)]
        if due:
            way = max(due, key=values.__getitem__)
            return WayTrial(way, place.best, place.trials.setdefault(way, {True: TokenRate(), False: TokenRate()}))
        until = min((place.due[way] - place.num_tokens for way in values if way != place.best), default=LOOK_EVERY)
        return BestTurn(min(until, LOOK_EVERY * place.number))

    def _first(self, values: dict[str, float]) -> str:
        """Return the way to begin with: plain decoding, unless another way is certainly faster."""
        way = max(values, key=values.__getitem__)
        surely = SURELY_BETTER + UNCERTAIN_SECONDS / self._plain_seconds
        return way if values[way] > surely * values[PLAIN] or self.times.is_known(way) else PLAIN

    def _judge(self, trial: WayTrial) -> None:
        """Adopt the tried way if it was faster than the best way; otherwise schedule its next trial."""
        place, way, ratio = self._place, trial.way, trial.ratio
        if trial.best != place.best:
            return
        if ratio > BETTER:
            place.num_lost[place.best] = place.num_lost[way] = 0
            way = place.best
            place.take(trial.way, TokenRate(trial.rates[True]))
            place.put_off(way, PAYBACK * place.number * NUM_BLOCKS * CALLS_OF_A_BLOCK * (ratio - 1))
        else:
            place.others[way] = ratio * place.rate.value
            place.num_lost[way] = min(place.num_lost.get(way, 0) + 1, MOST_DOUBLED)
            lost = max(0.0, trial.seconds * trial.rates[False].value - trial.num_tokens)
            place.put_off(way, lost * (FIRST_PAYBACK << place.num_lost[way]))
        if plain := place.measured(PLAIN):
            self._gains |= {name: place.measured(name) / plain for name in (place.best, way)}

    def _values(self, promises: dict[str, float | None]) -> dict[str, float]:
        """Return the tokens per second of all ways that can draft now: measured in this place, or expected."""
        plain, place = self._place.measured(PLAIN) or promises[PLAIN] or 1.0, self._place
        values = {}
        for way, promise in promises.items():
            if promise is None:
                promise = self._gains.get(way, UNMEASURED_GAIN) * plain
            if promise:
                values[way] = place.measured(way) or promise
        return values

    def _meet(self, number: int, longest: int) -> None:
        """Continue with the place for this number and length of sequences, or begin a new place."""
        if self._place.fits(number, longest):
            return
        known = [each for each in self._places if each.fits(number, longest)] or [Place(number, longest)]
        self._place, self._turn = known[0], None
        self._places = [self._place, *(each for each in self._places if each is not self._place)]


def _are_alike(number: int, before: int) -> bool:
    return number < MUCH_LONGER * before and before < MUCH_LONGER * number
