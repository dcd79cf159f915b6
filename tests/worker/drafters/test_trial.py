"""Steps with and without drafts are timed where drafts promise little, and the faster way stays for a while."""

from __future__ import annotations

import pytest

from swiftbatch.worker.drafters import trial
from swiftbatch.worker.drafters.trial import BLOCK_STEPS, CLEAR, MOST_AGE, MOST_TRYING, SETTLED, Trial

TRIED = 2 * (SETTLED + BLOCK_STEPS + 1)  # steps until both ways are known
SMALL = 1.1  # gain that the costs promise


class Machine:
    """A clock that steps advance: as long as the way of a step takes here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0
        monkeypatch.setattr(trial.time, "perf_counter", lambda: self.now)

    def run(self, tried: Trial, num_steps: int, gain: float = SMALL, num_sequences: int = 1) -> list[str]:
        """Steps of some sequences, whose trees bring two tokens each. The costs promise one without a tree a second."""
        ways = []
        for _ in range(num_steps):
            way = tried.way(gain, num_sequences * 1.0, num_sequences)
            self.now += self.seconds[way]
            for _ in range(num_sequences):
                tried.count(2 if way == "tree" else 1)
            ways.append(way)
        return ways


@pytest.mark.parametrize(("tree_seconds", "expected"), [(1.9, "tree"), (2.1, "plain")])
def test_the_faster_way_stays(tree_seconds: float, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = Machine(monkeypatch, plain=1.0, tree=tree_seconds).run(Trial(), TRIED + 100)
    assert {"plain", "tree"} == set(ways[: TRIED + 1])
    assert set(ways[TRIED + 1 :]) == {expected}


def test_a_clear_promise_needs_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(Machine(monkeypatch, plain=1.0, tree=9.0).run(Trial(), 100, gain=CLEAR)) == {"tree"}


def test_the_other_way_is_tried_again_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour may have been at work while it was tried."""
    machine, tried = Machine(monkeypatch, plain=1.0, tree=9.0), Trial()
    assert machine.run(tried, TRIED + MOST_AGE // 2)[-1] == "plain"
    machine.seconds["tree"] = 1.0
    ways = machine.run(tried, MOST_AGE)
    assert ways[0] == "plain"
    assert ways[-1] == "tree"


def test_a_slow_moment_of_the_way_that_stays_says_nothing_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, tried = Machine(monkeypatch, plain=1.0, tree=1.0), Trial()
    machine.run(tried, 2 * TRIED)
    machine.seconds["tree"] = 20.0
    machine.run(tried, SETTLED + BLOCK_STEPS)
    machine.seconds["tree"] = 1.0
    assert set(machine.run(tried, 50)) == {"tree"}


def test_a_pause_within_a_block_says_nothing_against_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is read between two steps takes as long as a hundred of them."""
    machine, tried = Machine(monkeypatch, plain=1.0, tree=1.5), Trial()
    machine.run(tried, SETTLED + BLOCK_STEPS // 2)
    machine.now += 100.0
    assert set(machine.run(tried, TRIED + 50)[TRIED:]) == {"tree"}


def test_steps_of_other_numbers_of_sequences_are_no_part_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, tried = Machine(monkeypatch, plain=1.0, tree=1.9), Trial()
    machine.run(tried, SETTLED + BLOCK_STEPS // 2)
    tried.way(SMALL, 5.0, num_sequences=5)
    machine.now += 1000.0
    assert set(machine.run(tried, TRIED + 50)[TRIED + 2 :]) == {"tree"}


def test_what_many_sequences_bring_is_not_held_against_what_few_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight jobs bring more in plain steps than one does with trees, which says nothing of either way."""
    machine, tried = Machine(monkeypatch, plain=1.0, tree=1.5), Trial()
    machine.run(tried, TRIED + 1, num_sequences=8)
    assert set(machine.run(tried, 100, num_sequences=1)) == {"tree"}


def test_where_sequences_come_and_go_at_every_step_the_promise_alone_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block becomes whole then, and a trial that never ends would hold the wrong way for good."""
    machine, tried, ways = Machine(monkeypatch, plain=1.0, tree=1.0), Trial(), list[str]()
    for step in range(4 * MOST_TRYING):
        ways += machine.run(tried, 1, num_sequences=1 + step % 2)
    assert "plain" in ways
    assert set(ways[-MOST_TRYING:]) == {"tree"}
