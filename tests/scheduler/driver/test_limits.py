from __future__ import annotations

import time
from pathlib import Path

import pytest

from swiftbatch.scheduler.cluster import ray_actors
from swiftbatch.scheduler.cluster.ray_cluster import Cluster
from swiftbatch.scheduler.driver.run_lease import current_progress
from swiftbatch.scheduler.driver.run_limits import Deadline, Limits
from tests.scheduler.driver.driver_parts import (
    RecordingDisplay,
    assert_undisturbed,
    job_id,
    make_driver,
    make_run,
    result_metrics,
)

JOBS = {"unlogged": 800, "short": 60}


def test_at_each_limit_all_is_written_and_a_larger_one_goes_on_to_the_same_tokens(
    tmp_path: Path, cluster: Cluster
) -> None:
    run, before = make_run(tmp_path / "run", JOBS), 0.0
    for number in (1, 2):
        some = Limits(max_total_tokens=100) if number == 1 else Limits(max_worker_hours=(before + 0.1) / 3600)
        display = RecordingDisplay()
        driver = make_driver(run, cluster, display, workers=1, limits=some)
        assert driver.run() == "interrupted"
        beat = run.progress()
        assert beat.reached_limit == driver.reached_limit is not None
        assert f"stopping at {beat.reached_limit}: nothing is lost" in display.notes
        assert ("--max-total-tokens" if number == 1 else "--max-worker-hours") in beat.reached_limit
        assert beat.running == {}
        assert 100 <= beat.num_total_tokens == beat.num_generated_tokens < 860  # none lost, none generated again
        assert beat.worker_seconds > before  # the first driver's count is continued
        before = beat.worker_seconds
    assert make_driver(run, cluster, RecordingDisplay(), workers=1, slots=2).run() == "finished"
    assert run.progress().reached_limit is None
    assert run.progress().num_total_tokens == sum(JOBS.values())
    assert_undisturbed(run, JOBS)
    assert result_metrics(run, "unlogged")["num_recovered_tokens"] > 100


def test_a_deadline_that_has_passed_starts_no_worker(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, display = make_run(tmp_path / "run", {"a": 10}), RecordingDisplay()
    monkeypatch.setattr(ray_actors, "create_actor", None)
    assert make_driver(run, cluster, display, limits=Limits(deadline=Deadline(time.time() - 1))).run() == "interrupted"
    assert run.progress().num_total_tokens == 0
    assert current_progress(run).jobs["pending"] == 1
    assert run.result(job_id(run, "a")) is None


def test_a_user_who_stops_it_is_told_of_no_limit(tmp_path: Path, cluster: Cluster) -> None:
    run, display = make_run(tmp_path / "run", {"a": 10}), RecordingDisplay()
    driver = make_driver(run, cluster, display, limits=Limits(deadline=Deadline(time.time() - 1)))
    driver.request_stop()
    assert driver.run() == "interrupted"
    assert driver.reached_limit is None
    assert run.progress().reached_limit is None
