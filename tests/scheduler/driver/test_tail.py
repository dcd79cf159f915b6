"""At the end of a run the deciding job gets no more neighbours."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.scheduler.cluster.worker_actor import WorkerInfo
from swiftbatch.scheduler.driver.dispatch import LastJobs, LoadBalancer
from swiftbatch.scheduler.driver.job_queue import JobQueue
from swiftbatch.scheduler.driver.worker_fleet import StepPace, Worker
from swiftbatch.worker.kernels.kernel_sizes import MOST_SLOTS
from tests.scheduler.driver.simulated_fleet import SimulatedRun, StepModel

STEP = StepModel(base=0.04, per_job=0.002)
ROOMY = 10**6  # pages
FREE = WorkerInfo("host", 1, None, "node", "", ROOMY)


def run_of(folder: Path, lengths: dict[str, int], num_workers: int) -> SimulatedRun:
    return SimulatedRun(folder, lengths, lengths, num_workers=num_workers, num_pages=ROOMY, step=STEP)


def bound(lengths: dict[str, int], num_workers: int) -> float:
    """Return a lower bound in seconds: each job among as few as let it end in time."""
    tokens, num_jobs = np.array([*lengths.values()]), np.arange(1, MOST_SLOTS + 1)
    steps = STEP.base + STEP.per_job * num_jobs

    def is_enough(seconds: float) -> bool:
        most = np.searchsorted(steps, seconds / tokens, "right")
        if most.min() < 1:
            return False
        return bool((tokens * steps[most - 1] / most).sum() <= num_workers * seconds)

    low, high = 0.0, float(tokens.sum()) * STEP.seconds(1)
    while high > 1.001 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def twenty_times_as_long(rng: random.Random, num_jobs: int) -> dict[str, int]:
    return {f"job {number}": int(50 * 20 ** rng.random()) for number in range(num_jobs)}


def test_long_jobs_run_among_few_of_their_like_where_they_decide_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = twenty_times_as_long(random.Random(1), 200)
    assert run_of(tmp_path / "run", lengths, 4).to_the_end() < 1.1 * bound(lengths, 4)
    monkeypatch.setattr(LoadBalancer, "plan", lambda self, most_jobs: None)
    assert run_of(tmp_path / "without", lengths, 4).to_the_end() > 1.15 * bound(lengths, 4)


def test_short_jobs_do_not_wait_for_long_ones_that_end_no_sooner_for_it() -> None:
    queue = JobQueue(5)
    for number, num_tokens in enumerate((4000, 4000, *[50] * 10)):
        queue.add(JobEntry(f"{number}", f"{number}", number, 1, num_tokens))
    pace = SimpleNamespace(seconds_per_token=STEP.seconds)
    fleet: Any = SimpleNamespace(workers=[Worker(name, None, None, FREE) for name in ("w1", "w2")], pace=pace)
    assert LoadBalancer(queue, fleet, 2).plan(32) is None
    for number in range(12, 112):
        queue.add(JobEntry(f"{number}", f"{number}", number, 1, 2000))
    assert LoadBalancer(queue, fleet, 2).plan(32) is not None


def test_who_runs_alone_or_before_others_have_started_has_no_plan() -> None:
    queue = JobQueue(5)
    for number in range(100):
        queue.add(JobEntry(f"{number}", f"{number}", number, 1, int(50 * 20 ** (number / 100))))
    workers = [Worker(name, None, None, FREE) for name in ("w1", "w2")]
    fleet: Any = SimpleNamespace(workers=workers[:1], pace=StepPace())
    balance = LoadBalancer(queue, fleet, 50)
    assert balance.plan(32) is None
    fleet.workers = workers
    plan = balance.plan(32)
    assert plan.most_jobs(500) >= 20, "each may have many of the jobs, though 48 workers have yet to come"
    assert plan.most_jobs(10**9) == 1


@pytest.mark.slow
def test_limits_that_say_nothing_matter_little_where_answers_are_as_long_as_their_prompts(tmp_path: Path) -> None:
    rng, names = random.Random(1), [f"job {number}" for number in range(1000)]
    prompts = {name: int(20 * 20 ** rng.random()) for name in names}
    lengths = {name: min(1500, int(2.5 * prompts[name] * rng.lognormvariate(0, 0.35)) + 1) for name in names}
    sizes: dict[str, Any] = {"num_workers": 4, "num_pages": ROOMY, "step": STEP}
    run = SimulatedRun(tmp_path, dict.fromkeys(names, 1500), lengths, prompts=prompts, **sizes)
    assert run.to_the_end() < 1.1 * bound(lengths, 4)


def test_one_giant_job_among_many_ends_a_run_within_a_tenth_of_the_least_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = {"giant": 2000} | {f"short {number}": 100 for number in range(150)}
    least = bound(lengths, 2)
    assert run_of(tmp_path / "run", lengths, 2).to_the_end() < 1.1 * least
    monkeypatch.setattr(LoadBalancer, "of_last", lambda self, now: None)
    monkeypatch.setattr(LoadBalancer, "plan", lambda self, most_jobs: None)
    assert run_of(tmp_path / "without", lengths, 2).to_the_end() > 1.1 * least


@pytest.mark.parametrize(("seconds", "moved"), [(0.01, []), (0.1, ["short"])])
def test_the_longest_job_is_relieved_of_a_short_one_only_where_it_ends_seconds_sooner(
    seconds: float, moved: list[str]
) -> None:
    """Two jobs on a worker take twice the seconds per token."""
    queue, worker = JobQueue(5), Worker("w1", None, None)
    for number, (name, num_tokens) in enumerate([("long", 300), ("short", 40)]):
        queue.add(JobEntry(name, name, number, 1, num_tokens))
        queue.take("w1", 0.0)
    fleet: Any = SimpleNamespace(pace=SimpleNamespace(seconds_per_token=lambda num_jobs: num_jobs * seconds))
    assert LoadBalancer(queue, fleet, 2).too_many(LastJobs(worker, 1 / seconds)) == moved


def test_workers_that_start_together_get_long_and_short_jobs_alike(tmp_path: Path) -> None:
    rng = random.Random(1)
    lengths = {f"job {number}": int(50 * 20 ** rng.random()) for number in range(60)}
    run = run_of(tmp_path, lengths, 4)
    seconds = run.to_the_end()
    most_steps = max(lengths.values()) * STEP.base + 1.2 * sum(lengths.values()) / 4 * STEP.per_job
    assert seconds < most_steps + 2
    assert sum(run.counters.num_preemptions.values()) < 15


def test_a_pace_is_the_line_through_what_was_seen() -> None:
    pace = StepPace()
    assert pace.seconds_per_token(5) == 0.0
    for num_jobs in (2, 20) * 20:
        pace.add(num_jobs, num_jobs * 100, 100 * STEP.seconds(num_jobs))
    for num_jobs in (1, 10, 32):
        assert pace.seconds_per_token(num_jobs) == pytest.approx(STEP.seconds(num_jobs), rel=0.05)


def test_before_other_numbers_were_seen_a_job_is_believed_to_be_sooner_alone() -> None:
    pace = StepPace()
    for _ in range(5):
        pace.add(32, 3200, 10.0)
        pace.add(0, 0, 10.0)  # one that only read prompts says nothing
    assert pace.seconds_per_token(32) == pytest.approx(0.1)
    assert 0.02 <= pace.seconds_per_token(1) < 0.05
    assert pace.seconds_per_token(1) < pace.seconds_per_token(16) < 0.1 < pace.seconds_per_token(64)
