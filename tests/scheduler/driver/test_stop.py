from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import Progress
from swiftbatch.jobs.storage.local_folder import LocalFolder
from swiftbatch.jobs.storage.store import StoreError
from swiftbatch.metrics.counters import DriverCounters
from swiftbatch.scheduler.cluster.ray_cluster import Cluster, ClusterLostError
from swiftbatch.scheduler.driver.driver import LOST_CLUSTER_SECONDS
from swiftbatch.scheduler.driver.queue_loading import load_queue
from swiftbatch.scheduler.driver.worker_fleet import Fleet, Worker
from tests.scheduler.driver.driver_parts import (
    RecordingDisplay,
    assert_undisturbed,
    job_id,
    last_beat_of_a_stopped,
    make_driver,
    make_run,
    result_metrics,
)


def num_logged(run: Run, custom_id: str) -> int:
    return len(CheckpointStore.of(run).read_log(job_id(run, custom_id)).token_ids)


def test_a_stopped_driver_has_all_checkpoints_written_and_the_next_one_goes_on(
    tmp_path: Path, cluster: Cluster
) -> None:
    jobs = {"unlogged-1": 400, "unlogged-2": 400, "short": 20}
    run, display = make_run(tmp_path / "run", jobs), RecordingDisplay()
    progress = last_beat_of_a_stopped(make_driver(run, cluster, display), run, display)
    assert progress.running == {}  # nothing lacks a checkpoint
    assert not progress.workers
    assert progress.jobs["running"] == 0
    num_known = sum(num_logged(run, name) for name in jobs) + (20 if run.ended()[0] else 0)
    assert num_known == progress.num_generated_tokens > 100
    assert load_queue(run, 5).num_generated_tokens == num_known  # counted from the token log and the results
    assert make_driver(run, cluster, RecordingDisplay(), workers=1, slots=2).run() == "finished"
    assert result_metrics(run, "unlogged-1")["num_recovered_tokens"] > 0
    assert_undisturbed(run, jobs)


def test_a_worker_that_does_not_answer_holds_a_stop_up_for_the_grace_period_only(
    tmp_path: Path, cluster: Cluster
) -> None:
    run, display = make_run(tmp_path / "run", {"stuck": 400, "unlogged": 400}), RecordingDisplay()
    driver = make_driver(run, cluster, display, grace=1.0, worker_timeout=100_000.0)  # nothing else ends the wait

    def stop(progress: Progress) -> None:
        if progress.num_generated_tokens > 100:
            driver.request_stop()

    display.on_update = stop
    assert driver.run() == "interrupted"
    progress = run.progress()
    assert set(progress.running) == {"stuck"}
    assert num_logged(run, "unlogged") > 0
    assert load_queue(run, 5).find(job_id(run, "stuck")).num_generated_tokens == progress.running["stuck"] > 0


def test_a_lost_cluster_ends_the_run_after_checkpoints_were_written(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, display = make_run(tmp_path / "run", {"unlogged": 400}), RecordingDisplay()
    drains: list[tuple[str, float]] = []
    begin_drain = Fleet.begin_drain

    def noted(fleet: Fleet, worker: Worker, reason: str, seconds: float) -> None:
        drains.append((reason, seconds))
        begin_drain(fleet, worker, reason, seconds)

    def lost() -> None:
        raise ClusterLostError("the head has not answered for 30 s")

    def lose(progress: Progress) -> None:
        if progress.num_generated_tokens > 100:
            monkeypatch.setattr(cluster.watch, "check", lost)

    display.on_update = lose
    monkeypatch.setattr(Fleet, "begin_drain", noted)
    with pytest.raises(ClusterLostError, match="not answered"):
        make_driver(run, cluster, display, workers=1, grace=3600.0).run()
    assert drains == [("cluster_lost", LOST_CLUSTER_SECONDS)]  # Ray itself would end the driver sooner than an hour
    assert num_logged(run, "unlogged") > 100
    assert run.progress().state == "interrupted"


def test_a_store_that_fails_a_worker_stops_the_run_and_blames_no_job(tmp_path: Path, cluster: Cluster) -> None:
    run, counters = make_run(tmp_path / "run", {"storeless": 400, "good": 20_000}), DriverCounters()
    with pytest.raises(StoreError, match="no answer for 120 s"):
        make_driver(run, cluster, RecordingDisplay(), attempts=1, counters=counters).run()
    assert counters.num_preemptions == {}
    assert not run.ended()[1]
    progress = run.progress()
    assert progress.state == "interrupted"
    assert set(progress.running) == {"storeless", "good"}


def test_the_first_failure_of_the_store_is_the_one_that_is_told(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, display = make_run(tmp_path / "run", {"good": 40_000}), RecordingDisplay()
    num_failures, write = itertools.count(1), LocalFolder.write

    def fail(self: LocalFolder, path: str, data: bytes | memoryview) -> None:
        if path == "progress.json":  # other files are written beside the loop
            raise OSError(f"failure {next(num_failures)}")
        write(self, path, data)

    def break_store(progress: Progress) -> None:
        if progress.num_generated_tokens > 50:
            monkeypatch.setattr(LocalFolder, "write", fail)

    display.on_update = break_store
    with pytest.raises(StoreError, match=r"failure 1\b"):
        make_driver(run, cluster, display, workers=1).run()
    assert next(num_failures) == 3  # the last heartbeat was tried as well


def test_a_beat_tells_what_lost_jobs_had_until_they_run_again(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftbatch.scheduler.driver.run_lease.BEAT_SECONDS", 0.02)  # a worker starts within 0.3 s
    run, display = make_run(tmp_path / "run", {"kills-workers": 1000}), RecordingDisplay()
    assert make_driver(run, cluster, display, workers=1, attempts=2).run() == "finished"  # it is given up
    waiting = [update.running for update in display.updates if update.jobs["pending"] and update.num_generated_tokens]
    assert {"kills-workers": 20} in waiting  # if the driver died now, they would be recomputed
    assert display.updates[-1].running == {}
