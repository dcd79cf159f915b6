"""The policy of drafting: it measures the tokens per second of each way to draft, and takes the fastest.

Another way is tried now and then. The more tokens a trial lost, the later comes the next one.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from swiftbatch.worker.drafters.drafter_interface import DraftRequest

PLAIN = "plain"  # the way without drafts
NUM_KEPT = 32  # newest calls that tell the rate of a way
PLAIN_CALLS, DRAFT_CALLS = 2, 16  # calls of a trial
FEWEST_CALLS = 6  # calls before a trial with drafts can be given up
SETTLING = 1  # calls at the beginning of a turn that are slower, since the processor's caches hold other data
HOPELESS, NEAR, BETTER, CLEARLY_BETTER = 0.8, 0.85, 1.03, 1.5  # times the rate of the best way
PAYBACK = 200  # tokens between trials for each token that a trial lost, or may lose
LOOK_EVERY = 512  # tokens of each sequence, until the best way is compared with the others as they were measured
SHORTEST_INTERVAL, LONGEST_INTERVAL = 64, 8192  # tokens of each sequence between trials
SURELY_BETTER = 2.0  # times plain decoding, as promised: a way that begins without any measurement
UNMEASURED_GAIN = 1.1  # times plain decoding, for a way that cannot promise anything
MUCH_LONGER = 1.5  # times the text of other sequences: rates measured for them do not count
NUM_TIMES, FEWEST_TIMES = 15, 3  # newest times that tell what a step takes beside its forward
MOST_HELD_UP = 1.5  # times the median of like calls
DRAFTING_SECONDS = 0.2e-3  # that drafts take beside forwards, before any was seen
MOST_BESIDE = 9  # times the seconds of a forward
STEPS_PER_TRIAL_CALL = 16  # plain steps: of fewer, what lies between two calls counts too much


class Call(NamedTuple):
    """The tokens, steps and draft tokens of one call of the target, of all sequences together."""

    num_tokens: int
    num_steps: int  # several where nothing was drafted
    num_draft_tokens: int

    @property
    def kind(self) -> tuple[int, int]:
        """Calls of a kind take about as long."""
        return self.num_steps, self.num_draft_tokens.bit_length()


class TokenRate:
    """The tokens per second of the newest calls, as if nothing had held one up."""

    def __init__(self) -> None:
        self._calls = deque[tuple[Call, float]](maxlen=NUM_KEPT)  # with their seconds
        self.num_calls = 0
        self._value: float | None = None  # None since a call came

    def observe(self, call: Call, seconds: float) -> None:
        self._calls.append((call, seconds))
        self.num_calls += 1
        self._value = None

    @property
    def value(self) -> float:
        """Tokens per second; 0 before the first call."""
        if self._value is None:
            by_kind = defaultdict[tuple[int, int], list[tuple[int, float]]](list)
            for call, seconds in self._calls:
                by_kind[call.kind].append((call.num_tokens, seconds))
            kinds = [calls for calls in by_kind.values() if len(calls) > 1] or list(by_kind.values())
            num_tokens = sum(number for calls in kinds for number, _ in calls)
            seconds = sum(_undisturbed([each for _, each in calls]) for calls in kinds)
            self._value = num_tokens / seconds if seconds else 0.0
        return self._value


def _undisturbed(seconds: list[float]) -> float:
    """Return the sum of the seconds of like calls, of which none counts for much more than the median."""
    most = MOST_HELD_UP * statistics.median_low(seconds)
    return sum(min(each, most) for each in seconds)


class StepTimes:
    """The seconds that steps of each way take beside their forwards: drafting, learning and a busy machine."""

    def __init__(self) -> None:
        self._beside: dict[str, deque[float]] = {}

    def observe(self, way: str, seconds: float, expected: float) -> None:
        """Take in a step that took `seconds` where its forwards should take `expected`."""
        kept = self._beside.setdefault(way, deque(maxlen=NUM_TIMES))
        kept.append(min(seconds - expected, MOST_BESIDE * expected))

    def is_known(self, way: str) -> bool:
        """Return whether enough steps have passed."""
        return len(self._beside.get(way, ())) >= FEWEST_TIMES

    def beside(self, way: str, otherwise: float) -> float:
        """Return the median seconds; a guess by those of plain steps, or by `otherwise`, where they are not known."""
        if self.is_known(way):
            return statistics.median(self._beside[way])
        plain = statistics.median(self._beside[PLAIN]) if self.is_known(PLAIN) else otherwise
        return plain if way == PLAIN else max(0.0, plain) + DRAFTING_SECONDS


class Kind(Enum):
    FIRST = "the best way by its promise, before any was measured"
    STEADY = "the best way"
    TRIAL = "another way"
    CHECK = "the best way, once more behind a trial that came near to it"


@dataclass
class Turn:
    """Calls in a row that go one way."""

    way: str
    kind: Kind
    tried: str = ""  # the way that a check is for
    most_tokens: int = 0  # of a steady turn
    num_calls: int = 0
    num_tokens: int = 0
    seconds: float = 0.0


@dataclass
class Place:
    """What is known for about so many sequences, the longest of about this length."""

    number: int
    longest: int
    best: str = ""
    num_tokens: int = 0
    rates: dict[str, TokenRate] = field(default_factory=dict)
    due: dict[str, int] = field(default_factory=dict)  # the `num_tokens` at which a way is tried
    num_lost: dict[str, int] = field(default_factory=dict)  # trials in a row

    def fits(self, number: int, longest: int) -> bool:
        return _are_alike(number, self.number) and _are_alike(longest, self.longest)

    def rate(self, way: str) -> float:
        """Return the measured tokens per second; 0 where there are none."""
        return self.rates[way].value if way in self.rates else 0.0

    def put_off(self, way: str, num_tokens: float) -> None:
        """Try a way after so many tokens, within bounds that double with every trial that it lost."""
        least = SHORTEST_INTERVAL * self.number << self.num_lost.get(way, 0)
        self.due[way] = self.num_tokens + int(min(max(least, num_tokens), LONGEST_INTERVAL * self.number))


class Policy:
    """Chooses the way of each call."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self._places: list[Place] = []
        self._place = Place(0, 0)
        self._turn: Turn | None = None  # None: the place is new
        self._names: list[str] = []  # of the newest call's sequences
        self._promised = 0.0  # tokens per second of the best way
        self._gains: dict[str, float] = {}  # of ways without promises, times the rate of plain decoding

    def choose(self, requests: list[DraftRequest], promises: Callable[[], dict[str, float | None]]) -> str:
        """Return the way of the coming call.

        `promises` are expected tokens per second of each way: 0 where it can draft nothing now, None where only a trial
        can tell.
        """
        names = [request.sequence.sequence_id for request in requests]
        is_over = self._turn is None or self._is_over(self._turn)
        if is_over or names != self._names:
            self._names = names
            self._meet(len(names), max(len(request.sequence) for request in requests))
        if is_over or self._turn is None:
            self._turn = self._next_turn(self._values(promises()))
        return self._turn.way

    def observe(self, way: str, call: Call, seconds: float, expected: float | None) -> None:
        """Take in what a call brought; its forwards should take `expected` seconds a step.

        A call that went another way than the turn tells nothing of the turn.
        """
        if expected is not None:
            self.times.observe(way, seconds / call.num_steps, expected)
        turn, place = self._turn, self._place
        if turn is None or way != turn.way:
            return
        place.num_tokens += call.num_tokens
        turn.num_calls, turn.num_tokens, turn.seconds = (
            turn.num_calls + 1,
            turn.num_tokens + call.num_tokens,
            turn.seconds + seconds,
        )
        if turn.num_calls > SETTLING:
            place.rates.setdefault(turn.way, TokenRate()).observe(call, seconds)

    @property
    def rate(self) -> float:
        """The tokens per second of the best way: measured, or promised before that."""
        return self._place.rate(self._place.best) or self._promised

    @property
    def most_steps(self) -> int:
        """The plain steps that one call of this turn may take."""
        turn = self._turn
        if turn is None or turn.kind is not Kind.STEADY:
            return STEPS_PER_TRIAL_CALL
        return max(1, (turn.most_tokens - turn.num_tokens) // max(1, self._place.number))

    def num_tokens_to_trial(self, way: str) -> int:
        """Return the tokens of each sequence until a way is tried."""
        if self._turn is not None and way in (self._turn.way, self._turn.tried):
            return 0
        place = self._place
        return (place.due.get(way, place.num_tokens) - place.num_tokens) // max(1, place.number)

    def _is_over(self, turn: Turn) -> bool:
        if turn.kind is Kind.STEADY:
            return turn.num_tokens >= turn.most_tokens
        num_known = turn.num_calls - SETTLING
        if turn.kind is Kind.TRIAL and num_known >= FEWEST_CALLS and self._ratio(turn.way) < HOPELESS:
            return True
        return num_known >= (PLAIN_CALLS if turn.way == PLAIN else DRAFT_CALLS)

    def _next_turn(self, values: dict[str, float]) -> Turn:
        """End the turn, and begin another one. `values` are the tokens per second of the ways that can be gone."""
        place, turn = self._place, self._turn
        if turn is not None and turn.kind is Kind.TRIAL and turn.way != place.best:
            if place.best in values and NEAR < self._ratio(turn.way) < CLEARLY_BETTER:
                return Turn(place.best, Kind.CHECK, tried=turn.way, num_tokens=turn.num_tokens, seconds=turn.seconds)
            self._judge(turn.way, turn)
        elif turn is not None and turn.kind is Kind.CHECK:
            self._judge(turn.tried, turn)
        if place.best not in values:
            place.best = max(values, key=values.__getitem__)
            if values[place.best] < SURELY_BETTER * values[PLAIN] and not self.times.is_known(place.best):
                place.best = PLAIN
        self._promised = values[place.best]
        if not place.rate(place.best):
            return Turn(place.best, Kind.FIRST)
        due = [way for way in values if way != place.best and self._is_due(way, values[way])]
        if due:
            way = max(due, key=values.__getitem__)
            place.rates.pop(way, None)
            return Turn(way, Kind.TRIAL)
        return self._steady(values)

    def _steady(self, values: dict[str, float]) -> Turn:
        """Return a turn of the best way until another one is due, or until its rate is looked at again."""
        place, turn = self._place, self._turn
        until = min((place.due[way] - place.num_tokens for way in values if way != place.best), default=LOOK_EVERY)
        went_on = turn is not None and turn.way == place.best
        most_tokens = min(until, LOOK_EVERY * place.number)
        return Turn(place.best, Kind.STEADY, most_tokens=most_tokens, num_calls=SETTLING if went_on else 0)

    def _is_due(self, way: str, value: float) -> bool:
        """Return whether a way should be tried now."""
        place = self._place
        if way not in place.due:
            shortfall = max(0.0, place.rate(place.best) / value - 1)
            place.put_off(way, PAYBACK * DRAFT_CALLS * place.number * shortfall)
            if value >= place.rate(place.best):
                place.due[way] = place.num_tokens
        is_faster = place.rate(way) > BETTER * place.rate(place.best)  # the best way became slower than it was
        return is_faster or place.num_tokens + STEPS_PER_TRIAL_CALL * place.number >= place.due[way]

    def _judge(self, way: str, turn: Turn) -> None:
        """Take a way that was faster than the best one; try another one again later."""
        place, ratio = self._place, self._ratio(way)
        if ratio > BETTER:
            place.num_lost[place.best] = place.num_lost[way] = 0
            place.best, way = way, place.best
            place.put_off(way, PAYBACK * DRAFT_CALLS * place.number * (ratio - 1))
        else:
            place.num_lost[way] = min(place.num_lost.get(way, 0) + 1, 7)
            place.put_off(way, PAYBACK * max(0.0, turn.seconds * place.rate(place.best) - turn.num_tokens))
        if plain := place.rate(PLAIN):
            self._gains |= {name: rate.value / plain for name, rate in place.rates.items()}

    def _ratio(self, way: str) -> float:
        best = self._place.rate(self._place.best)
        return self._place.rate(way) / best if best else 1.0

    def _values(self, promises: dict[str, float | None]) -> dict[str, float]:
        """Return the tokens per second of all ways that can be gone: measured here, or promised."""
        plain, place = promises[PLAIN] or 1.0, self._place
        values = {}
        for way, promise in promises.items():
            if promise is None:
                promise = self._gains.get(way, UNMEASURED_GAIN) * (place.rate(PLAIN) or plain)
            if promise:
                values[way] = place.rate(way) or promise
        return values

    def _meet(self, number: int, longest: int) -> None:
        """Go on where such sequences were; begin anew where there were none."""
        if self._place.fits(number, longest):
            return
        known = [each for each in self._places if each.fits(number, longest)] or [Place(number, longest)]
        self._place, self._turn = known[0], None
        self._places = [self._place, *(each for each in self._places if each is not self._place)]


def _are_alike(number: int, before: int) -> bool:
    return number < MUCH_LONGER * before and before < MUCH_LONGER * number
