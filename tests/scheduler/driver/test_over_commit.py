"""Jobs longer than expected: the youngest are returned, and all end."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from swiftbatch.scheduler.driver.expected_lengths import Forecast
from swiftbatch.worker.kv import kv_capacity
from swiftbatch.worker.kv.kv_capacity import pages_of
from tests.scheduler.driver.simulated_fleet import SimulatedRun, StepModel

STEP = StepModel(base=0.04, per_job=0.002)


def drawn(rng: random.Random, num_jobs: int, limit: int) -> dict[str, int]:
    return {f"job {number}": min(limit, int(rng.expovariate(5 / limit)) + 1) for number in range(num_jobs)}


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_no_job_makes_an_older_one_leave_and_hand_backs_are_no_more_than_ends(
    tmp_path: Path, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulated worker asserts the first. The driver expects no growth, so memory runs out often."""
    monkeypatch.setattr(Forecast, "final_tokens", lambda self, num_prompt_tokens, num_tokens, max_tokens: num_tokens)
    limit, lengths = 1000, drawn(random.Random(num_workers), 40, 1000)
    sizes = {"num_workers": num_workers, "num_pages": pages_of(limit), "step": STEP}
    run = SimulatedRun(tmp_path, dict.fromkeys(lengths, limit), lengths, **sizes)
    run.to_the_end()
    assert run.num_ended == len(lengths)
    assert 0 < run.num_slices_evicted <= run.num_ended + num_workers
    assert run.counters.num_preemptions["memory_full"] >= run.num_slices_evicted
    assert all(worker.most_pages <= pages_of(limit) for worker in run.workers.values())


def test_jobs_that_end_as_others_did_rarely_have_to_leave(tmp_path: Path) -> None:
    limit, lengths = 1000, drawn(random.Random(7), 60, 1000)
    sizes = {"num_workers": 1, "num_pages": 3 * pages_of(limit), "step": STEP}
    run = SimulatedRun(tmp_path, dict.fromkeys(lengths, limit), lengths, **sizes)
    run.to_the_end()
    assert run.num_ended == len(lengths)
    assert sum(run.counters.num_preemptions.values()) <= 6


def test_memory_is_shared_by_long_jobs_at_different_lengths_and_short_ones_beside_them(tmp_path: Path) -> None:
    """Slots for the longest job would hold two at a time."""
    limits = {f"long {number}": 1600 for number in range(10)} | {f"short {number}": 100 for number in range(60)}
    sizes = {"num_workers": 1, "num_pages": 2 * pages_of(1600) + 10, "step": StepModel(base=0.05, per_job=0.0)}
    run = SimulatedRun(tmp_path, limits, limits, **sizes)
    seconds = run.to_the_end()
    assert not run.counters.num_preemptions
    assert seconds < 0.9 * 5 * 1600 * 0.05


def test_jobs_longer_than_the_horizon_take_turns_and_end_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The youngest waits when the jobs are long."""
    monkeypatch.setattr(kv_capacity, "HORIZON", 160)
    limits = {f"long {number}": 1600 for number in range(10)} | {f"short {number}": 100 for number in range(60)}
    sizes = {"num_workers": 1, "num_pages": 2 * pages_of(1600) + 10, "step": StepModel(base=0.05, per_job=0.0)}
    run = SimulatedRun(tmp_path, limits, limits, **sizes)
    seconds = run.to_the_end()
    assert 0 < run.counters.num_preemptions["memory_full"] < 40
    assert seconds < 0.75 * 5 * 1600 * 0.05
