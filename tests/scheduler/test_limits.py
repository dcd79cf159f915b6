from __future__ import annotations

import time

import pytest

from swiftbatch.scheduler.commands.options.option_types import parse_deadline
from swiftbatch.scheduler.driver.run_limits import Deadline, Limits, Spending
from tests.jobs.run.run_parts import PROGRESS


def test_each_limit_is_reached_at_its_number_and_told_with_what_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = Spending(num_tokens=4999, worker_seconds=1799.0)
    limits = Limits(deadline=Deadline(1000.0), max_total_tokens=5000, max_worker_hours=0.5)
    monkeypatch.setattr(time, "time", lambda: 999.9)
    assert limits.reached(spent) is None
    assert Limits().reached(Spending(10**12, 1e12)) is None
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert limits.reached(spent).startswith("--deadline 19")
    assert Limits(max_total_tokens=5000).reached(Spending(5012, 0)) == "--max-total-tokens 5,000 (5,012 were generated)"
    assert Limits(max_worker_hours=0.5).reached(Spending(0, 1800)) == "--max-worker-hours 0.5 (0.5 were used)"


def test_a_duration_lasts_as_long_however_the_clock_is_set_and_a_moment_follows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = time.time()
    in_two_hours, at_a_moment = parse_deadline("2h", began), Deadline(began + 7200)
    monkeypatch.setattr(time, "time", lambda: began + 3 * 3600)
    assert not in_two_hours.has_passed()
    assert at_a_moment.has_passed()
    none_left = parse_deadline("0s", began)
    monkeypatch.setattr(time, "time", lambda: began - 3 * 3600)
    assert none_left.has_passed()
    assert not at_a_moment.has_passed()
    assert 0 < in_two_hours.seconds_left() <= 7200


def test_all_limits_that_are_reached_are_told_at_once() -> None:
    both = Limits(max_total_tokens=5, max_worker_hours=1).reached(Spending(5, 3600))
    assert both == "--max-total-tokens 5 (5 were generated) and --max-worker-hours 1 (1 were used)"


def test_what_was_taken_goes_on_from_the_last_driver_and_what_it_had_not_told_of() -> None:
    last = PROGRESS.model_copy(update={"num_generated_tokens": 100, "num_total_tokens": 130, "worker_seconds": 9.0})
    assert Spending.so_far(None, 7) == Spending(7, 0.0)
    assert Spending.so_far(last, 100) == Spending(130, 9.0)
    assert Spending.so_far(last, 108) == Spending(138, 9.0)  # its workers had written 8 more when it was killed
    assert Spending.so_far(last, 90) == Spending(130, 9.0)  # a failed job's no longer count
