"""Turns with and without drafts: the better way wins, and trials become rare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.auto.plain_trials import (
    DRAFTING_PERIODS,
    DRAFTS_TRIAL,
    MOST_TRIED,
    PLAIN_CALLS,
    PLAIN_PERIODS,
    DraftTrials,
)
from swiftbatch.worker.drafters.drafter_interface import DraftRequest, Verified
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.verification import Verification

AT_ONCE = 8  # plain steps
FIRST = (PLAIN_CALLS + 1) * AT_ONCE  # steps; the first call teaches nothing


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def sequence_of(name: str, length: int = 10) -> Sequence:
    return Sequence(name, [1] * length, SamplingParams(max_tokens=100_000, seed=1), 50)


def verified(num_tokens: int, num_steps: int, num_draft_tokens: int) -> list[Verified]:
    tree = DraftTree.chain([1] * num_draft_tokens)
    return [(sequence_of("a"), Verification(tree, [], [1] * num_tokens, [1], None, None, num_steps=num_steps))]


@dataclass
class Machine:
    """Eight plain steps of a second each at once; drafts bring two tokens a step."""

    tree_seconds: float
    slowed: Callable[[], float] = lambda: 1.0  # a factor of each call's time
    clock: Clock = field(default_factory=Clock)
    went: list[bool] = field(default_factory=list)  # the way of each step

    def __post_init__(self) -> None:
        self.turns = DraftTrials(self.clock)

    def run(self, num_steps: int, *sequences: Sequence, are_promised: bool = True) -> list[bool]:
        requests = [DraftRequest(each, 31, 31, 0.0) for each in sequences or (sequence_of("a"),)]
        before = len(self.went)
        while len(self.went) < before + num_steps:
            self.turns.begin(requests, are_promised)
            has_drafts = self.turns.has_drafts
            passed, seconds = (1, self.tree_seconds) if has_drafts else (AT_ONCE, AT_ONCE)
            self.clock.now += seconds * self.slowed()
            self.turns.hear(verified(2 if has_drafts else passed, passed, 3 * has_drafts))
            self.went += [has_drafts] * passed
        return self.went[before:]


def test_the_first_steps_have_no_trees_and_a_trial_follows() -> None:
    went = Machine(1.9).run(FIRST + DRAFTS_TRIAL)
    assert went == [False] * FIRST + [True] * DRAFTS_TRIAL


def test_trees_that_bring_more_stay_but_for_trials_without() -> None:
    went = Machine(1.5).run(sum(DRAFTING_PERIODS))
    assert sum(went) > 0.95 * len(went)
    assert not all(went[2 * FIRST + MOST_TRIED :])


def test_trees_that_bring_less_are_tried_ever_more_seldom() -> None:
    went = Machine(3.0).run(FIRST + sum(PLAIN_PERIODS))
    assert sum(went) == DRAFTS_TRIAL * len(PLAIN_PERIODS)


def test_trees_that_promise_nothing_in_a_trial_end_it() -> None:
    went = Machine(3.0).run(FIRST + PLAIN_PERIODS[1], are_promised=False)
    assert sum(went) == 1  # the step after which nothing was promised


def test_a_trial_of_trees_that_come_near_lasts_longer() -> None:
    went = Machine(2.05).run(FIRST + PLAIN_PERIODS[0])
    assert sum(went) == MOST_TRIED


def test_trees_that_seem_to_win_are_held_against_plain_steps_at_once() -> None:
    went = Machine(1.5).run(FIRST + MOST_TRIED + FIRST + DRAFTING_PERIODS[1])
    assert went == [False] * FIRST + [True] * MOST_TRIED + [False] * FIRST + [True] * DRAFTING_PERIODS[1]


def test_a_machine_that_was_slow_in_the_first_steps_alone_leads_to_no_drafts() -> None:
    machine = Machine(3.0)
    machine.slowed = lambda: 2.5 if len(machine.went) < FIRST else 1.0
    went = machine.run(FIRST + MOST_TRIED + 2 * FIRST)
    assert sum(went) == MOST_TRIED
    assert not any(went[-FIRST:])


def test_a_way_that_was_wrong_is_left_soon() -> None:
    machine = Machine(3.0)
    machine.slowed = lambda: 1.0 if machine.turns.has_drafts or len(machine.went) > 2 * FIRST + MOST_TRIED else 3.0
    went = machine.run(sum(PLAIN_PERIODS[:2]))
    assert sum(went) <= MOST_TRIED + DRAFTING_PERIODS[1] + 2 * DRAFTS_TRIAL


@pytest.mark.parametrize(("tree_seconds", "has_drafts"), [(3.0, False), (1.3, True)])
def test_calls_that_are_held_up_now_and_then_turn_no_way(tree_seconds: float, has_drafts: bool) -> None:
    for seed in range(20):
        generator = np.random.default_rng(seed)
        machine = Machine(tree_seconds, lambda g=generator: g.uniform(2, 10) if g.random() < 0.05 else 1.0)
        went = machine.run(4096)
        assert sum(way != has_drafts for way in went) < 0.1 * len(went)


def test_what_passes_between_steps_or_in_a_third_way_counts_for_none() -> None:
    turns, requests = DraftTrials(clock := Clock()), [DraftRequest(sequence_of("a"), 31, 31, 0.0)]
    for _ in range(PLAIN_CALLS + 1):
        turns.begin(requests)
        clock.now += AT_ONCE
        turns.hear(verified(AT_ONCE, AT_ONCE, 0))
        clock.now += 1000
    assert turns.plain_rate == 1
    turns.begin(requests)
    clock.now += 1000
    turns.hear(verified(1, 1, 1), is_turns=False)
    assert turns.plain_rate == 1


@pytest.mark.parametrize("lengths", [(10, 4000), (4000, 10)])
def test_texts_much_longer_or_shorter_are_tried_soon(lengths: tuple[int, int]) -> None:
    machine = Machine(3.0)
    machine.run(2 * PLAIN_PERIODS[1], sequence_of("a", lengths[0]))
    assert any(machine.run(FIRST + DRAFTS_TRIAL, sequence_of("b", lengths[1])))


@pytest.mark.parametrize(("tree_seconds", "has_drafts"), [(3.0, False), (0.9, True)])
def test_jobs_like_others_before_go_on_where_those_were(tree_seconds: float, has_drafts: bool) -> None:
    machine = Machine(tree_seconds)
    for length in (10, 4000):
        machine.run(FIRST + DRAFTS_TRIAL, sequence_of(str(length), length))
    for name, length in (("c", 10), ("d", 4000), ("e", 11)):
        assert set(machine.run(AT_ONCE, sequence_of(name, length))) == {has_drafts}


def test_what_a_text_shows_that_has_become_long_says_nothing_of_short_ones() -> None:
    machine, growing = Machine(3.0), sequence_of("a")
    machine.run(FIRST + DRAFTS_TRIAL, growing)
    machine.tree_seconds = 0.9
    for _ in range(20):
        growing.extend([1] * 400)
        machine.run(400, growing)
    assert all(machine.run(AT_ONCE, sequence_of("b", 8000)))
    machine.tree_seconds = 3.0
    assert sum(machine.run(PLAIN_PERIODS[0], sequence_of("c"))) <= DRAFTS_TRIAL


def test_jobs_whose_prompt_is_one_token_are_like_each_other() -> None:
    machine = Machine(0.9)
    machine.run(FIRST + DRAFTS_TRIAL, sequence_of("a", 1))
    assert all(machine.run(AT_ONCE, sequence_of("b", 1)))


def test_a_trial_that_many_other_sequences_come_into_decides_nothing_for_them() -> None:
    machine = Machine(3.0)
    machine.run(FIRST + DRAFTS_TRIAL // 2)
    went = machine.run(FIRST + DRAFTS_TRIAL, *(sequence_of(name) for name in "abcd"))
    assert went == [False] * FIRST + [True] * DRAFTS_TRIAL
