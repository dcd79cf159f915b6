"""What drafting costs beside its rows is measured while steps pass, and both kinds of steps stay known."""

from __future__ import annotations

import time

import pytest

from worker.drafters.step_clock import FEWEST, LOOK_EVERY, LOOK_SOON, StepClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    """One whose time stands still unless a test moves it."""
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    return StepClock()


def steps(monkeypatch: pytest.MonkeyPatch, clock: StepClock, seconds: list[float], is_drafted: bool) -> None:
    """Steps of so many seconds, each of which should have had a forward of one."""
    for each in seconds:
        monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
        clock.begin(1.0, is_drafted)
        monkeypatch.setattr(time, "perf_counter", lambda each=each: each)
        clock.end()


def test_what_drafting_adds_is_what_steps_with_drafts_take_longer(
    monkeypatch: pytest.MonkeyPatch, clock: StepClock
) -> None:
    steps(monkeypatch, clock, [1.1] * FEWEST, is_drafted=False)
    assert clock.drafting_seconds == 0.0  # nothing is known of it
    steps(monkeypatch, clock, [1.4] * FEWEST, is_drafted=True)
    assert clock.drafting_seconds == pytest.approx(0.3)
    steps(monkeypatch, clock, [1.9] * 20, is_drafted=False)
    assert clock.drafting_seconds == 0.0  # and never less


def test_a_step_that_waited_for_something_else_tells_little(monkeypatch: pytest.MonkeyPatch, clock: StepClock) -> None:
    steps(monkeypatch, clock, [1.0] * 5, is_drafted=False)
    steps(monkeypatch, clock, [1.2, 60.0, 1.2, 60.0, 1.2], is_drafted=True)
    assert clock.drafting_seconds == pytest.approx(0.2)


def test_a_step_of_another_kind_is_not_counted(monkeypatch: pytest.MonkeyPatch, clock: StepClock) -> None:
    steps(monkeypatch, clock, [1.0] * 5, is_drafted=False)
    for _ in range(5):
        clock.begin(1.0, is_drafted=True)
        clock.forget()
        clock.end()
    assert clock.drafting_seconds == 0.0


def test_steps_without_drafts_come_now_and_then_where_all_draft(
    monkeypatch: pytest.MonkeyPatch, clock: StepClock
) -> None:
    kinds = []
    for _ in range(4 * LOOK_EVERY):
        kinds.append(clock.is_plain_due)
        clock.begin(1.0, is_drafted=not kinds[-1])
    plain = [number for number, is_plain in enumerate(kinds) if is_plain]
    assert plain[:FEWEST] == [LOOK_SOON + number * (LOOK_SOON + 1) for number in range(FEWEST)]
    assert plain[FEWEST] == plain[FEWEST - 1] + LOOK_EVERY + 1
