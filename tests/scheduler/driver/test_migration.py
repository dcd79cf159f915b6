"""At a run's end, idle workers take half-done jobs from others."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftbatch.metrics.counters import DriverCounters
from swiftbatch.scheduler.cluster.ray_cluster import Cluster
from swiftbatch.scheduler.driver import dispatch
from tests.scheduler.driver.driver_parts import (
    RecordingDisplay,
    assert_undisturbed,
    make_driver,
    make_run,
    result_metrics,
)


def test_an_idle_worker_takes_a_job_over_from_one_that_holds_several(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "MIN_MOVE_SECONDS", 0.1)
    # long enough to still run when a busy machine's last worker starts
    jobs = {"unlogged-1": 3900, "unlogged-2": 3860, "unlogged-3": 3820, "unlogged-4": 3780, "a": 50, "b": 40}
    run, display, counters = make_run(tmp_path / "run", jobs), RecordingDisplay(), DriverCounters()
    driver = make_driver(run, cluster, display, workers=3, slots=2, attempts=1, counters=counters)
    assert driver.run() == "finished"
    assert counters.num_preemptions.keys() == {"migrated"}  # 2 + 2 + 0 jobs become 2 + 1 + 1; a slow worker gives more
    assert_undisturbed(run, jobs)
    moved = [found for name in jobs if (found := result_metrics(run, name))["num_attempts"] > 1]
    assert moved
    for each in moved:
        assert len(set(each["workers"])) > 1  # another worker continues it
        assert each["num_recovered_tokens"] == each["num_reported_tokens"] > 0


def test_a_job_that_is_nearly_done_stays_where_it_is(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "MIN_MOVE_SECONDS", 1000.0)  # however slow the machine is
    monkeypatch.setattr(dispatch, "MIN_RELIEF_SECONDS", 1000.0)
    run, counters = make_run(tmp_path / "run", {"long-1": 300, "long-2": 290, "a": 50, "b": 40}), DriverCounters()
    assert make_driver(run, cluster, RecordingDisplay(), slots=2, counters=counters).run() == "finished"
    assert counters.num_preemptions == {}
