"""Workers that must leave return their jobs whole and without blame."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayError

from swiftbatch.jobs.run.run_records import Progress
from swiftbatch.metrics.counters import DRIVER_METRICS, DriverCounters
from swiftbatch.scheduler.cluster import ray_actors
from swiftbatch.scheduler.cluster.ray_cluster import Cluster
from swiftbatch.scheduler.cluster.worker_actor import WorkerSpec
from swiftbatch.scheduler.driver.worker_fleet import Fleet, Reported
from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.session.work_messages import Orders, WorkReport
from tests.scheduler.driver.driver_parts import (
    RecordingDisplay,
    assert_undisturbed,
    make_driver,
    make_run,
    result_metrics,
)
from tests.scheduler.driving import is_alive, wait_until


def test_a_worker_that_is_told_to_end_hands_its_jobs_back_whole_and_unblamed(tmp_path: Path, cluster: Cluster) -> None:
    run, display, counters = make_run(tmp_path / "run", {"unlogged": 500}), RecordingDisplay(), DriverCounters()
    numbers, ended = [signal.SIGTERM, signal.SIGINT], list[int]()

    def terminate(progress: Progress) -> None:
        busy = [worker.pid for worker in progress.workers if worker.jobs and worker.pid not in ended]
        if numbers and busy and progress.num_generated_tokens > 100 * (1 + len(ended)):
            ended.append(busy[0])
            os.kill(busy[0], numbers.pop(0))

    display.on_update = terminate
    # with one attempt a strike would end the job
    assert make_driver(run, cluster, display, workers=1, attempts=1, counters=counters).run() == "finished"
    assert counters.num_preemptions == {"worker_terminated": 2}
    metrics = result_metrics(run, "unlogged")
    assert metrics["workers"] == ["w1", "w2", "w3"]
    assert metrics["numerics"] == ["counting"] * 3
    assert metrics["num_recovered_tokens"] == metrics["num_reported_tokens"] > 200  # nothing is recomputed
    assert {f"worker {worker} was told to end from outside" for worker in ("w1", "w2")} <= set(display.notes)
    assert display.updates[-1].running == {}


def test_ended_jobs_whose_results_a_killed_worker_had_not_written_run_again_to_the_same_tokens(
    tmp_path: Path, cluster: Cluster
) -> None:
    jobs = {"long": 700, **{f"short-{number}": 20 + number for number in range(4)}}
    run, display = make_run(tmp_path / "run", jobs), RecordingDisplay()
    unwritten: list[int] = []

    def kill(progress: Progress) -> None:
        if not unwritten and progress.workers and progress.jobs["running"] > 2:  # more than it has slots
            unwritten.append(progress.jobs["running"])
            assert not run.ended()[0]
            os.kill(progress.workers[0].pid, signal.SIGKILL)

    display.on_update = kill
    assert make_driver(run, cluster, display, workers=1, slots=2).run() == "finished"
    assert unwritten
    assert_undisturbed(run, jobs)
    assert len(run.store.read("output.jsonl") or b"") > 0
    assert display.updates[-1].jobs["finished"] == len(jobs)


def test_a_worker_with_nothing_to_do_that_gets_sigterm_is_replaced(tmp_path: Path, cluster: Cluster) -> None:
    run, display, counters = make_run(tmp_path / "run", {"a": 600, "b": 20}), RecordingDisplay(), DriverCounters()
    ended: list[int] = []

    def terminate(progress: Progress) -> None:
        idle = [worker.pid for worker in progress.workers if not worker.jobs]
        busy = [worker.pid for worker in progress.workers if worker.jobs]
        if not ended and progress.jobs["finished"] == 1 and idle and busy:
            ended.extend([*idle, *busy])
            os.kill(idle[0], signal.SIGTERM)
            os.kill(busy[0], signal.SIGKILL)  # its job goes to the idle worker first, which takes no more work

    display.on_update = terminate
    assert make_driver(run, cluster, display, counters=counters).run() == "finished"
    assert ended
    assert counters.num_preemptions == {"worker_died": 1, "worker_terminated": 1}


def drain_once(cluster: Cluster, counters: DriverCounters, patch: pytest.MonkeyPatch) -> Callable[[Progress], None]:
    def drain(progress: Progress) -> None:
        if progress.num_generated_tokens > 100 and not counters.num_preemptions:
            patch.setattr(cluster.watch, "draining", lambda: {progress.workers[0].node_id: 30.0})
        elif counters.num_preemptions:
            patch.setattr(cluster.watch, "draining", dict)

    return drain


def test_workers_on_a_draining_node_stop_and_others_take_their_jobs(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, display, counters = make_run(tmp_path / "run", {"unlogged": 900}), RecordingDisplay(), DriverCounters()
    display.on_update = drain_once(cluster, counters, monkeypatch)
    assert make_driver(run, cluster, display, workers=1, attempts=1, counters=counters).run() == "finished"
    assert counters.num_preemptions["node_drained"] >= 1
    assert set(counters.num_preemptions) == {"node_drained"}
    metrics = result_metrics(run, "unlogged")
    assert metrics["num_recovered_tokens"] == metrics["num_reported_tokens"] > 100
    assert any("its node is about to go" in note for note in display.notes)


class ClusterSuspendedError(BaseException):
    """Ends a driver after its workers drained."""


def test_a_run_whose_cluster_is_suspended_goes_on_at_the_next_admission_with_the_same_tokens(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kueue preempts a cluster by ending all its pods at once."""
    jobs = {"unlogged-a": 500, "unlogged-b": 500}
    run, display, counters = make_run(tmp_path / "run", jobs), RecordingDisplay(), DriverCounters()

    def suspend(progress: Progress) -> None:
        if len(progress.running) == len(jobs) and all(progress.running.values()):
            nodes = {worker.node_id: 30.0 for worker in progress.workers if worker.node_id}
            monkeypatch.setattr(cluster.watch, "draining", lambda: nodes)
        if sum(counters.num_preemptions.values()) >= len(jobs):
            raise ClusterSuspendedError

    display.on_update = suspend
    with pytest.raises(ClusterSuspendedError):
        make_driver(run, cluster, display, attempts=1, counters=counters).run()
    assert set(counters.num_preemptions) == {"node_drained"}
    monkeypatch.undo()
    assert make_driver(run, cluster, RecordingDisplay(), workers=1, slots=2, attempts=1).run() == "finished"
    assert_undisturbed(run, jobs)
    assert all(result_metrics(run, name)["num_recovered_tokens"] > 0 for name in jobs)


def test_a_worker_that_dies_while_it_drains_is_no_fault_of_its_job(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, display, counters = make_run(tmp_path / "run", {"dies": 900}), RecordingDisplay(), DriverCounters()
    display.on_update = drain_once(cluster, counters, monkeypatch)
    assert make_driver(run, cluster, display, workers=1, attempts=1, counters=counters).run() == "finished"
    assert set(counters.num_preemptions) == {"node_drained"}
    assert not run.ended()[1]


def test_a_stopped_worker_is_replaced_and_its_late_return_changes_nothing(tmp_path: Path, cluster: Cluster) -> None:
    jobs = {"a": 600, "b": 600}
    run, display, counters = make_run(tmp_path / "run", jobs), RecordingDisplay(), DriverCounters()
    stopped: list[int] = []

    def stop_one(progress: Progress) -> None:
        busy = [worker.pid for worker in progress.workers if worker.jobs]
        if not stopped and busy and progress.num_generated_tokens > 100:
            stopped.append(busy[0])
            os.kill(stopped[0], signal.SIGSTOP)
        elif stopped and counters.num_preemptions.get("worker_silent"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped[0], signal.SIGCONT)

    display.on_update = stop_one
    assert make_driver(run, cluster, display, counters=counters, worker_timeout=5.0).run() == "finished"
    assert counters.num_preemptions["worker_silent"] >= 1
    assert any("is lost: it has not reported for " in note for note in display.notes)
    assert_undisturbed(run, jobs)
    assert max(result_metrics(run, name)["num_recovered_tokens"] for name in jobs) > 0
    wait_until(lambda: not is_alive(stopped[0]))  # it is not left behind


@dataclass
class SilentFleet:
    """Two workers never answer, and the clock is manual."""

    fleet: Fleet
    killed: list[object]
    clock: list[float]

    def wait(self, seconds: float) -> list[str]:
        """Advance the clock in small steps; return the workers given up."""
        events = []
        for _ in range(int(seconds * 2)):
            self.clock[0] += 0.5
            events += self.fleet.wait(0.0, self.clock[0])
        return [event.worker.id for event in events]


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> SilentFleet:
    killed: list[object] = []
    clock = [0.0]
    method = SimpleNamespace(remote=lambda *_: object())
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ray_actors, "create_actor", lambda *_, **__: SimpleNamespace(start=method, work=method))
    monkeypatch.setattr(ray_actors, "wait", lambda calls, seconds: [])
    monkeypatch.setattr(ray_actors, "kill", killed.append)
    cluster: Any = SimpleNamespace(is_embedded=True, num_cpus_per_worker=lambda: 0, gives_gpus=lambda device: False)
    fleet = Fleet(WorkerSpec(EngineConfig(), ""), cluster, timeout=20)
    fleet.fill(2, 0.0)
    return SilentFleet(fleet, killed, clock)


@pytest.mark.parametrize("is_reserve", [False, True])
def test_a_worker_may_take_its_time_to_start_and_to_take_a_job_in(silent: SilentFleet, is_reserve: bool) -> None:
    starting, working = silent.fleet.workers
    orders: Any = {"orders": Orders(), "has_backlog": True} if is_reserve else {"orders": Orders((cast("Any", None),))}
    silent.fleet.work(working, seconds=0.5, **orders)
    assert silent.wait(190) == []  # it may have gigabytes of checkpoints to read
    assert silent.wait(20) == ["w2"]
    assert silent.killed == [working.actor]
    assert silent.wait(1000) == []
    assert silent.fleet.workers == [starting]


def test_a_worker_without_orders_owes_no_report(silent: SilentFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = silent.fleet.workers[0]
    silent.fleet.work(idle, Orders(), 0.5)
    monkeypatch.setattr(ray_actors, "wait", lambda calls, seconds: [idle.call] if idle.call in calls else [])
    monkeypatch.setattr(ray_actors, "answer", lambda call: WorkReport())
    assert [type(event) for event in silent.fleet.wait(0.0, 0.0)] == [Reported]
    assert silent.wait(1000) == []


def test_a_driver_that_was_stopped_blames_no_worker(silent: SilentFleet) -> None:
    silent.fleet.work(silent.fleet.workers[0], Orders(), 0.5)
    assert silent.wait(10) == []
    silent.clock[0] += 1000
    assert silent.wait(5) == []  # nobody listened meanwhile
    assert silent.wait(10) == ["w1"]


@pytest.mark.parametrize(
    ("error", "reason", "message"),
    [
        (OutOfMemoryError("1 worker(s) were killed\nTop 10 memory users:"), "worker_out_of_memory", "low on memory"),
        (ActorDiedError(), "worker_died", "its process ended"),
        (ActorUnavailableError("no route", None), "worker_unreachable", "can't be reached"),
    ],
)
def test_why_a_worker_was_lost_is_said_in_a_line(
    error: RayError, reason: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(call: object) -> None:
        raise error

    monkeypatch.setattr(ray, "get", fail)
    with pytest.raises(ray_actors.WorkerLostError, match=message) as caught:
        ray_actors.answer(object())
    assert caught.value.reason == reason
    assert reason in next(metric.label_values for metric in DRIVER_METRICS if metric.name == "preemptions_total")
    assert "\n" not in str(caught.value)


def test_a_worker_that_is_to_go_does_not_keep_its_successor_from_starting(silent: SilentFleet) -> None:
    fleet = silent.fleet
    fleet.begin_drain(fleet.workers[0], "node_drained", 20.0)
    fleet.fill(2, 0.0)
    fleet.fill(2, 0.0)
    assert [worker.id for worker in fleet.workers] == ["w1", "w2", "w3"]
