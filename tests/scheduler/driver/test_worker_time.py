"""Worker time counts from each worker's readiness to its end, even between two heartbeats."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swiftbatch.scheduler.cluster import ray_actors
from swiftbatch.scheduler.cluster.ray_cluster import Cluster
from swiftbatch.scheduler.cluster.worker_actor import WorkerSpec
from swiftbatch.scheduler.driver.run_lease import BEAT_SECONDS
from swiftbatch.scheduler.driver.run_limits import Spending
from swiftbatch.scheduler.driver.run_progress import ProgressCounter
from swiftbatch.scheduler.driver.worker_fleet import Fleet
from swiftbatch.worker.config import EngineConfig
from tests.scheduler.driver.dispatch_parts import Dispatched, NoOpWorker, with_driver
from tests.scheduler.driver.driver_parts import make_context, make_run
from tests.simulated_clock import SimulatedClock


def test_a_worker_counts_from_its_readiness_to_its_end_and_after_earlier_drivers(tmp_path: Path) -> None:
    run, clock = make_run(tmp_path / "run", {"a": 300}), SimulatedClock()
    calls: Any = SimpleNamespace(
        create_actor=lambda *_, **__: NoOpWorker(Dispatched(run, 0)),
        wait=lambda calls, seconds: calls,
        answer=lambda call: call.value,
        kill=lambda actor: None,
    )
    cluster = Cluster(is_embedded=True, num_gpus=0, watch=None)
    fleet = Fleet(WorkerSpec(EngineConfig(), run.store.uri), cluster, 20, calls, clock)
    census = ProgressCounter(make_context(run, fleet, spent=Spending(worker_seconds=1000.0)))

    def counted_after(seconds: float) -> float:
        clock.now += seconds
        return float(census.take(clock())["worker_seconds"]) - 1000.0

    fleet.fill(2, clock())
    assert counted_after(50.0) == 0.0  # it may wait for a node
    fleet.wait(0.0, clock())
    clock.now += 3.0
    fleet.retire(fleet.workers[0])
    assert counted_after(0.0) == 3.0 + 3.0
    assert counted_after(10.0) == 3.0 + 13.0
    fleet.fill(2, clock())  # starts one that is never ready
    clock.now += 1.0
    fleet.stop()
    assert counted_after(100.0) == 3.0 + 14.0


def test_a_run_shorter_than_a_heartbeat_has_the_time_of_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatched, driver = with_driver(tmp_path, 1, monkeypatch)
    clock = SimulatedClock()
    clock.rule(monkeypatch)
    monkeypatch.setattr(ray_actors, "wait", clock.taking(lambda *_: BEAT_SECONDS / 4, ray_actors.wait))
    assert driver.run() == "finished"
    progress = dispatched.run.progress()
    assert progress.worker_seconds == BEAT_SECONDS / 4  # ready after the first wait, done after the second
