"""The policy takes the way that really brings most, and its trials cost little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.choice.policy import (
    CALLS_OF_A_BLOCK,
    LONGEST_INTERVAL,
    NUM_BLOCKS,
    PLAIN,
    SETTLING,
    STEPS_PER_TRIAL_CALL,
    UNMEASURED_GAIN,
    Policy,
    StepCall,
)
from swiftbatch.worker.drafters.drafter_interface import DraftRequest
from swiftbatch.worker.sampling.sequence import Sequence

FIRST = 2 * STEPS_PER_TRIAL_CALL  # plain tokens
BLOCK = 2 * (SETTLING + CALLS_OF_A_BLOCK)  # tokens with drafts
TREE = "tree"


def sequence_of(name: str, length: int = 10) -> Sequence:
    return Sequence(name, [1] * length, SamplingParams(max_tokens=100_000, seed=1), 50)


@dataclass
class Machine:
    """A simulated machine: a plain token takes a unit of time, by default half a millisecond, a step with drafts brings
    two tokens.
    """

    seconds: dict[str, float] = field(default_factory=lambda: {TREE: 2.0})  # units of a step with drafts, by way
    promises: dict[str, float | None] = field(default_factory=lambda: {TREE: 1.8})
    slowed: Callable[[], float] = lambda: 1.0  # a factor of each call's time
    policy: Policy = field(default_factory=Policy)
    ways: list[str] = field(default_factory=list)  # of each token
    unit: float = 0.5e-3  # seconds
    now: float = 0.0  # units

    def run(self, num_tokens: int, *sequences: Sequence) -> list[str]:
        """Return the ways of so many tokens."""
        requests = [DraftRequest(each, 31, 31) for each in sequences or (sequence_of("a"),)]
        before = len(self.ways)
        while len(self.ways) < before + num_tokens:
            way = self.policy.choose(requests, self._promises)
            steps = min(32, self.policy.most_steps) if way == PLAIN else 1
            tokens, seconds = (steps, float(steps)) if way == PLAIN else (2, self.seconds[way])
            seconds *= self.slowed()
            self.now += seconds
            self.policy.observe(way, StepCall(tokens, steps, 3 * (way != PLAIN)), seconds * self.unit, None)
            self.ways += [way] * tokens
        return self.ways[before:]

    def _promises(self) -> dict[str, float | None]:
        promised = {PLAIN: 1.0, **self.promises}
        return {way: rate if rate is None else rate / self.unit for way, rate in promised.items()}


def share(ways: list[str], way: str = TREE) -> float:
    return ways.count(way) / len(ways)


def test_plain_steps_are_measured_first_and_then_what_promises_more() -> None:
    ways = Machine().run(FIRST + NUM_BLOCKS * (BLOCK + STEPS_PER_TRIAL_CALL))
    assert ways == [PLAIN] * FIRST + ([TREE] * BLOCK + [PLAIN] * STEPS_PER_TRIAL_CALL) * NUM_BLOCKS


def test_a_way_that_promises_twice_as_much_is_measured_first() -> None:
    assert Machine(promises={TREE: 3.8}, seconds={TREE: 0.8}).run(100)[0] == TREE


def test_where_steps_take_long_a_smaller_promise_is_enough_to_be_the_first_and_trials_are_shorter() -> None:
    slow = {"promises": {TREE: 1.8}, "unit": 20e-3}
    assert Machine(**slow).run(100)[0] == TREE
    assert Machine(promises={TREE: 1.8}).run(100)[0] == PLAIN
    ways = Machine(seconds={TREE: 1.0}, **slow).run(1024)
    assert share(ways[:128]) > 0.85
    assert share(ways) > 0.95


def test_short_texts_are_alike() -> None:
    machine = Machine({TREE: 3.0})
    machine.run(256, sequence_of("a", 10))
    machine.run(1024, sequence_of("b", 400))
    ways = machine.run(40, sequence_of("c", 500))
    assert share(ways, PLAIN) == 1


@pytest.mark.parametrize("seconds", [1.0, 1.8])
def test_drafts_that_bring_more_stay(seconds: float) -> None:
    assert share(Machine({TREE: seconds}).run(4096)) > 0.85


@pytest.mark.parametrize(("seconds", "most"), [(8.0, 0.01), (3.0, 0.03), (2.2, 0.05)])
def test_drafts_that_bring_less_are_tried_seldom(seconds: float, most: float) -> None:
    assert share(Machine({TREE: seconds}).run(8192)) < most


def test_trials_of_three_ways_lose_a_fiftieth_of_the_time_at_most() -> None:
    machine = Machine({TREE: 3.0, "chain": 5.0, "mtp": 2.5}, {TREE: 1.2, "chain": 1.5, "mtp": None})
    machine.run(20_000)
    assert machine.now < 1.02 * 20_000


def test_trials_become_ever_rarer() -> None:
    ways = Machine({TREE: 2.1}).run(40_000)
    tried = [at for at in range(64, len(ways)) if ways[at] == TREE and TREE not in ways[at - 64 : at]]
    assert np.diff(tried).max() <= LONGEST_INTERVAL + 300
    assert tried[-1] - tried[-2] > 3 * (tried[1] - tried[0])


def test_a_way_that_promises_little_is_not_tried_in_a_short_job() -> None:
    assert share(Machine({TREE: 4.0}, {TREE: 0.5}).run(256)) == 0


def test_a_way_that_promises_little_is_tried_in_the_end() -> None:
    assert share(Machine({TREE: 1.0}, {TREE: 0.5}).run(32_768)) > 0.7


def test_a_way_that_cannot_promise_anything_is_tried() -> None:
    machine = Machine({"mtp": 1.0}, {"mtp": None})
    assert share(machine.run(2048), "mtp") > 0.8
    assert UNMEASURED_GAIN > 1


def test_a_way_that_can_draft_nothing_is_not_taken() -> None:
    machine = Machine({TREE: 0.1}, {TREE: 0.0})
    assert share(machine.run(1000)) == 0


def test_the_best_way_is_left_where_it_can_draft_nothing_any_more() -> None:
    machine = Machine({TREE: 0.5}, {TREE: 4.0})
    assert share(machine.run(500)) > 0.8
    machine.promises[TREE] = 0.0
    assert share(machine.run(9000)[-100:]) == 0


def test_a_way_that_became_slow_is_left_soon() -> None:
    machine = Machine({TREE: 1.0})
    machine.run(1024)
    machine.seconds[TREE] = 4.0
    assert share(machine.run(4096)[-1000:]) < 0.1


def test_a_machine_that_was_slow_in_the_first_steps_alone_turns_no_way() -> None:
    machine = Machine({TREE: 3.0})
    machine.slowed = lambda: 2.5 if len(machine.ways) < FIRST else 1.0
    assert share(machine.run(4096)[-2000:]) < 0.1


@pytest.mark.parametrize(("seconds", "best"), [(3.0, PLAIN), (1.3, TREE)])
def test_calls_that_are_held_up_now_and_then_turn_no_way(seconds: float, best: str) -> None:
    for seed in range(20):
        generator = np.random.default_rng(seed)
        held_up = lambda g=generator: g.uniform(2, 10) if g.random() < 0.05 else 1.0  # noqa: E731
        assert share(Machine({TREE: seconds}, slowed=held_up).run(4096), best) > 0.85


@pytest.mark.parametrize("lengths", [(10, 4000), (4000, 10)])
def test_texts_much_longer_or_shorter_are_measured_anew(lengths: tuple[int, int]) -> None:
    machine = Machine({TREE: 3.0})
    machine.run(2048, sequence_of("a", lengths[0]))
    machine.seconds[TREE] = 0.5
    assert share(machine.run(1024, sequence_of("b", lengths[1]))) > 0.7


@pytest.mark.parametrize(("seconds", "best"), [(3.0, PLAIN), (0.9, TREE)])
def test_jobs_like_others_before_go_on_as_those_did(seconds: float, best: str) -> None:
    machine = Machine({TREE: seconds})
    for length in (10, 4000):
        machine.run(FIRST + NUM_BLOCKS * (BLOCK + STEPS_PER_TRIAL_CALL), sequence_of(str(length), length))
    for name, length in (("c", 10), ("d", 4000), ("e", 11)):
        assert share(machine.run(40, sequence_of(name, length)), best) == 1


def test_more_sequences_are_measured_by_themselves() -> None:
    machine = Machine({TREE: 0.5})
    machine.run(1024)
    machine.seconds[TREE] = 3.0
    machine.run(1024, *(sequence_of(name) for name in "abcd"))
    assert machine.run(200, *(sequence_of(name) for name in "abcd"))[-50:] == [PLAIN] * 50
    machine.seconds[TREE] = 0.5
    assert share(machine.run(200)) == 1


def test_a_call_that_went_another_way_tells_nothing_of_the_turn() -> None:
    machine = Machine({TREE: 3.0})
    machine.run(1024)
    before = machine.policy.rate
    machine.policy.observe("repeat", StepCall(9, 1, 8), 1000.0, None)
    assert machine.policy.rate == before == pytest.approx(1.0 / machine.unit)


def test_it_is_known_how_soon_a_way_is_tried() -> None:
    machine, waits = Machine({TREE: 3.0}), []
    for _ in range(200):
        machine.run(16)
        waits.append(machine.policy.num_tokens_to_trial(TREE))
    ways = machine.run(waits[-1] + 200)
    assert waits[-1] - 32 <= ways.index(TREE) <= waits[-1] + 64


def test_what_a_step_takes_beside_its_forward_is_the_median_of_its_way() -> None:
    times = Policy().times
    assert times.beside(PLAIN, otherwise=0.5) == 0.5
    assert times.beside(TREE, otherwise=0.5) > 0.5
    for seconds in (1.1, 1.2, 60.0, 1.1, 1.2):
        times.observe(PLAIN, seconds, expected=1.0)
    assert times.beside(PLAIN, otherwise=0.5) == pytest.approx(0.2)
    for _ in range(3):
        times.observe(TREE, 0.9, expected=1.0)
    assert times.beside(TREE, otherwise=0.5) == pytest.approx(-0.1)
