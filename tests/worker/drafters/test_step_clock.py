"""Drafting's own costs are measured during steps."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from swiftbatch.worker.drafters.step_clock import (
    ENOUGH,
    FEWEST,
    FORGOTTEN_FOR_RETRIAL,
    NUM_KEPT,
    PROBE_EVERY,
    PROBE_SOON,
    SETTLED,
    StepClock,
    StepKind,
    together,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    return StepClock()


def steps(monkeypatch: pytest.MonkeyPatch, clock: StepClock, seconds: list[float], kind: StepKind) -> None:
    """Each step should have taken one second."""
    for each in seconds:
        monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
        clock.begin(1.0, kind)
        monkeypatch.setattr(time, "perf_counter", lambda each=each: each)
        clock.end()


def test_what_drafting_adds_is_what_steps_with_drafts_take_longer(
    monkeypatch: pytest.MonkeyPatch, clock: StepClock
) -> None:
    steps(monkeypatch, clock, [1.1] * (SETTLED + FEWEST), "plain")
    assert clock.drafting_seconds == 0.0  # nothing is known of it
    steps(monkeypatch, clock, [1.4] * (SETTLED + FEWEST), "tree")
    assert clock.drafting_seconds == pytest.approx(0.3)
    assert clock.beside("plain", 7.0) == pytest.approx(0.1)
    assert clock.beside("chain", 7.0) == 7.0
    steps(monkeypatch, clock, [1.9] * 20, "plain")
    assert clock.drafting_seconds == 0.0  # and never less


def test_steps_that_are_sooner_done_than_expected_say_so_too(monkeypatch: pytest.MonkeyPatch, clock: StepClock) -> None:
    """The machine was busy when costs were measured, but drafts compare with plain steps as they are."""
    steps(monkeypatch, clock, [0.7] * (SETTLED + FEWEST), "plain")
    steps(monkeypatch, clock, [1.2] * (SETTLED + FEWEST), "tree")
    assert clock.beside("plain", 7.0) == pytest.approx(-0.3)
    assert clock.drafting_seconds == pytest.approx(0.5)
    assert together(1.0, -0.3) == pytest.approx(0.7)
    assert together(0.1, -0.3) == 0.05  # of shorter texts; a step always takes some time


def test_what_was_slow_once_is_tried_again(monkeypatch: pytest.MonkeyPatch, clock: StepClock) -> None:
    clock.doubt("tree")  # nothing is known of it
    steps(monkeypatch, clock, [1.0] * (SETTLED + FEWEST), "plain")
    steps(monkeypatch, clock, [1.2] * (SETTLED + 1) + [1.9] * NUM_KEPT, "tree")
    seen = []
    while clock.drafting_seconds:
        seen.append(clock.drafting_seconds)
        clock.doubt("tree")
    assert len(seen) == (NUM_KEPT - FEWEST) // FORGOTTEN_FOR_RETRIAL + 1
    assert seen == sorted(seen, reverse=True)


def test_the_first_steps_of_a_kind_are_not_counted(monkeypatch: pytest.MonkeyPatch, clock: StepClock) -> None:
    for _ in range(5):
        steps(monkeypatch, clock, [1.9] * SETTLED + [1.1], "plain")
        steps(monkeypatch, clock, [1.9] * SETTLED + [1.2], "tree")
    assert clock.drafting_seconds == pytest.approx(0.1)


def test_plain_steps_that_nobody_was_asked_for_tell_what_one_takes(
    monkeypatch: pytest.MonkeyPatch, clock: StepClock
) -> None:
    """Asking takes a fifth of a short step, so asked steps seem slower."""
    steps(monkeypatch, clock, [1.9] * 3, "tree")
    clock.begin(1.0, "plain")
    assert clock.num_plain_due == SETTLED + FEWEST - 1
    clock.pass_by(1.0, [1.9] * (SETTLED - 1) + [1.2] * (FEWEST - 1) + [1.4])
    assert clock.num_plain_due == 0
    assert clock.beside("plain", 7.0) == pytest.approx(0.2)
    monkeypatch.setattr(time, "perf_counter", lambda: 60.0)
    clock.end()  # the step before them has no end
    assert clock.beside("plain", 7.0) == pytest.approx(0.2)


def test_what_is_known_of_a_step_later_counts_too(monkeypatch: pytest.MonkeyPatch, clock: StepClock) -> None:
    for _ in range(SETTLED + FEWEST):
        monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
        clock.begin(1.0, "chain")
        clock.expect(0.5)
        monkeypatch.setattr(time, "perf_counter", lambda: 1.7)
        clock.end()
    assert clock.beside("chain", 0.0) == pytest.approx(0.2)


def test_a_step_that_waited_for_something_else_tells_little(monkeypatch: pytest.MonkeyPatch, clock: StepClock) -> None:
    steps(monkeypatch, clock, [1.0] * 5, "plain")
    steps(monkeypatch, clock, [1.2] * SETTLED + [1.2, 60.0, 1.2, 60.0, 1.2], "tree")
    assert clock.drafting_seconds == pytest.approx(0.2)


def test_steps_without_drafts_come_now_and_then_where_all_draft(clock: StepClock) -> None:
    kinds = []
    for _ in range(4 * PROBE_EVERY):
        kinds.append(clock.is_plain_due)
        clock.begin(1.0, "plain" if kinds[-1] else "tree")
    begins = [n for n, is_plain in enumerate(kinds) if is_plain and not kinds[n - 1]]
    assert all(all(kinds[n : n + SETTLED + FEWEST]) for n in begins)
    waits = [after - before - SETTLED - FEWEST for before, after in pairwise((-SETTLED - FEWEST, *begins))]
    soon = ENOUGH // FEWEST  # a few may all have been slow
    assert waits[:soon] == [PROBE_SOON] * soon
    assert set(waits[soon:]) == {PROBE_EVERY}
    assert sum(kinds) == len(begins) * (SETTLED + FEWEST)
