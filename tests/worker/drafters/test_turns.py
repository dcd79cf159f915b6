"""Turns with drafts and without: steps go the way that really brings more, and trials become rare."""

from __future__ import annotations

import pytest

from swiftbatch.jobs.sampling import SamplingParams
from swiftbatch.worker.drafters.base import DraftRequest
from swiftbatch.worker.drafters.two_level.turns import (
    DRAFTS_TRIAL,
    FIRST_TURN,
    SETTLING,
    SHORTEST_TURN,
    TRIAL,
    DraftTurns,
)
from swiftbatch.worker.drawing.sequence import Sequence


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def sequence_of(name: str, length: int = 10) -> Sequence:
    return Sequence(name, [1] * length, SamplingParams(max_tokens=100_000, seed=1), 50)


def ways(
    tree_seconds: float, num_steps: int, tokens: int = 2, rested: int = 8, names: tuple[str, ...] = ("a",)
) -> list[bool]:
    """Return the way of each step, where plain steps pass by `rested` and take a second each, trees `tree_seconds`."""
    turns, clock, went = DraftTurns(clock := Clock()), clock, list[bool]()
    requests = [DraftRequest(sequence_of(name), 31, 31, 0.0) for name in names]
    while len(went) < num_steps:
        turns.begin(requests)
        passed = 1 if turns.has_drafts else rested
        went += [turns.has_drafts] * passed
        clock.now += tree_seconds if turns.has_drafts else passed
        turns.hear(len(names) * (tokens if turns.has_drafts else passed), passed)
    return went


def test_the_first_steps_have_no_trees_and_a_trial_follows() -> None:
    went = ways(1.5, FIRST_TURN + TRIAL)
    assert not any(went[:FIRST_TURN])
    assert all(went[FIRST_TURN:])


def test_trees_that_bring_more_stay_but_for_trials_without() -> None:
    went = ways(1.5, 4 * SHORTEST_TURN)  # 2 tokens in 1.5 seconds
    assert sum(went) > 0.95 * len(went)
    assert not all(went[FIRST_TURN:])


def test_trees_that_bring_less_are_tried_ever_more_seldom() -> None:
    went = ways(3.0, 8 * SHORTEST_TURN)  # 2 tokens in 3 seconds
    assert sum(went) == 4 * TRIAL  # behind the first turn, and behind 1, 2 and 4 intervals


def test_a_trial_of_trees_that_come_near_lasts_longer() -> None:
    went = ways(2.05, FIRST_TURN + SHORTEST_TURN)
    assert sum(went) == DRAFTS_TRIAL


def test_what_passes_between_steps_or_in_a_third_way_counts_for_none() -> None:
    turns, requests = DraftTurns(clock := Clock()), [DraftRequest(sequence_of("a"), 31, 31, 0.0)]
    for _ in range(FIRST_TURN // 8):
        turns.begin(requests)
        clock.now += 8
        turns.hear(8, 8)
        clock.now += 1000
    turns.begin(requests)
    clock.now += 1000
    turns.hear(1, 1, is_turns=False)
    assert turns.plain_rate == 1


@pytest.mark.parametrize("lengths", [(10, 4000), (4000, 10)])
def test_texts_much_longer_or_shorter_are_tried_soon(lengths: tuple[int, int]) -> None:
    clock = Clock()
    turns, went = DraftTurns(clock), list[list[bool]]()
    for name, length in zip("ab", lengths, strict=True):
        requests, of_text = [DraftRequest(sequence_of(name, length), 31, 31, 0.0)], list[bool]()
        for _ in range(6 * SHORTEST_TURN):
            turns.begin(requests)
            of_text.append(turns.has_drafts)
            clock.now += 3 if turns.has_drafts else 1
            turns.hear(2 if turns.has_drafts else 1, 1)
        went.append(of_text)
    assert any(went[1][: FIRST_TURN + 2])


def test_a_trial_that_many_other_sequences_come_into_decides_nothing() -> None:
    turns, few = DraftTurns(clock := Clock()), [DraftRequest(sequence_of("a"), 31, 31, 0.0)]
    many = [DraftRequest(sequence_of(name), 31, 31, 0.0) for name in "abcd"]
    went = list[bool]()
    for step in range(2 * FIRST_TURN + SHORTEST_TURN):
        turns.begin(few if step < FIRST_TURN + SETTLING else many)
        clock.now += 3 if turns.has_drafts else 1
        turns.hear(2 if turns.has_drafts else 1, 1)
        went.append(turns.has_drafts)
    assert sum(went) <= FIRST_TURN + SETTLING + 2 * TRIAL
    assert not went[-1]
