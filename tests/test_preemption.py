"""Workers that have to go hand their jobs back whole and without blame; jobs move to idle workers at the end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver_parts import RecordingDisplay, counting_cluster, job_id, make_driver, make_run, result_metrics, token_hash

from jobs.checkpoints import CheckpointStore
from jobs.run import Progress, Run
from jobs.store import StoreError
from metrics.counters import DriverCounters
from scheduler import dispatch
from scheduler.backlog import load_queue
from scheduler.cluster import Cluster
from scheduler.cluster_watch import ClusterLostError


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with counting_cluster() as cluster:
        yield cluster


def num_logged(run: Run, custom_id: str) -> int:
    return len(CheckpointStore(run.store).read_tokens(job_id(run, custom_id)))


def test_a_worker_that_gets_sigterm_hands_its_jobs_back_whole_and_unblamed(tmp_path: Path, cluster: Cluster) -> None:
    run, display, counters = make_run(tmp_path / "run", {"unlogged": 300}), RecordingDisplay(), DriverCounters()
    ended: list[int] = []

    def terminate(progress: Progress) -> None:
        if not ended and progress.num_generated_tokens > 100:
            ended.append(progress.workers[0].pid)
            os.kill(ended[0], signal.SIGTERM)

    display.on_update = terminate
    # one attempt: a strike would end the job
    assert make_driver(run, cluster, display, workers=1, attempts=1, counters=counters).run() == "finished"
    assert counters.num_preemptions == {"worker_terminated": 1}
    metrics = result_metrics(run, "unlogged")
    assert metrics["workers"] == ["w1", "w2"]
    assert metrics["num_recovered_tokens"] == metrics["num_reported_tokens"] > 100  # nothing is recomputed
    assert "worker w1 was told to end from outside" in display.notes
    assert display.updates[-1].running == {}


def test_a_worker_with_nothing_to_do_that_gets_sigterm_is_replaced(tmp_path: Path, cluster: Cluster) -> None:
    run, display, counters = make_run(tmp_path / "run", {"a": 600, "b": 20}), RecordingDisplay(), DriverCounters()
    ended: list[int] = []

    def terminate(progress: Progress) -> None:
        idle = [worker.pid for worker in progress.workers if not worker.jobs]
        busy = [worker.pid for worker in progress.workers if worker.jobs]
        if not ended and progress.jobs["finished"] == 1 and idle and busy:
            ended.extend([*idle, *busy])
            os.kill(idle[0], signal.SIGTERM)
            os.kill(busy[0], signal.SIGKILL)  # its job goes to the idle one first, which takes no more work

    display.on_update = terminate
    assert make_driver(run, cluster, display, counters=counters).run() == "finished"
    assert ended
    assert counters.num_preemptions == {"worker_died": 1, "worker_terminated": 1}


def test_a_stopped_driver_has_all_checkpoints_written(tmp_path: Path, cluster: Cluster) -> None:
    run, display = make_run(tmp_path / "run", {"unlogged-1": 400, "unlogged-2": 400}), RecordingDisplay()
    driver = make_driver(run, cluster, display)
    display.on_update = lambda progress: driver.request_stop() if progress.num_generated_tokens > 100 else None
    assert driver.run() == "interrupted"
    progress = run.progress()
    assert progress is not None
    assert progress.state == "interrupted"
    assert progress.running == {}  # nothing was left without a checkpoint
    assert num_logged(run, "unlogged-1") + num_logged(run, "unlogged-2") == progress.num_generated_tokens > 100
    assert make_driver(run, cluster, RecordingDisplay()).run() == "finished"
    assert result_metrics(run, "unlogged-1")["num_recovered_tokens"] > 0


def test_a_worker_that_does_not_answer_holds_a_stop_up_for_the_grace_period_only(
    tmp_path: Path, cluster: Cluster
) -> None:
    run, display = make_run(tmp_path / "run", {"stuck": 400, "unlogged": 400}), RecordingDisplay()
    driver = make_driver(run, cluster, display, grace=1.0)
    stopped: list[float] = []

    def stop(progress: Progress) -> None:
        if not stopped and progress.num_generated_tokens > 100:
            stopped.append(time.monotonic())
            driver.request_stop()

    display.on_update = stop
    assert driver.run() == "interrupted"
    assert time.monotonic() - stopped[0] < 5
    progress = run.progress()
    assert progress is not None
    assert set(progress.running) == {"stuck"}
    assert num_logged(run, "unlogged") > 0
    assert load_queue(run, 5).num_reported_tokens(job_id(run, "stuck")) == progress.running["stuck"] > 0


def test_workers_on_a_draining_node_stop_and_others_take_their_jobs(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, display, counters = make_run(tmp_path / "run", {"unlogged": 300}), RecordingDisplay(), DriverCounters()

    def drain(progress: Progress) -> None:
        if progress.num_generated_tokens > 100 and not counters.num_preemptions:
            # the node drains as long as the first worker lives: a single one can't be drained and go on
            monkeypatch.setattr(cluster.watch, "draining", lambda: {progress.workers[0].node_id: 30.0})
        elif counters.num_preemptions:
            monkeypatch.setattr(cluster.watch, "draining", dict)

    display.on_update = drain
    assert make_driver(run, cluster, display, workers=1, attempts=1, counters=counters).run() == "finished"
    assert counters.num_preemptions["node_drained"] >= 1
    assert set(counters.num_preemptions) == {"node_drained"}
    metrics = result_metrics(run, "unlogged")
    assert metrics["num_recovered_tokens"] == metrics["num_reported_tokens"] > 100
    assert any("its node is about to go" in note for note in display.notes)


def test_a_lost_cluster_ends_the_run_after_checkpoints_were_written(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, display = make_run(tmp_path / "run", {"unlogged": 400}), RecordingDisplay()

    def lost() -> None:
        raise ClusterLostError("the head has not answered for 30 s")

    def lose(progress: Progress) -> None:
        if progress.num_generated_tokens > 100:
            monkeypatch.setattr(cluster.watch, "check", lost)

    display.on_update = lose
    with pytest.raises(ClusterLostError, match="not answered"):
        make_driver(run, cluster, display, workers=1).run()
    assert num_logged(run, "unlogged") > 100
    progress = run.progress()
    assert progress is not None
    assert progress.state == "interrupted"


def test_an_idle_worker_takes_a_job_over_from_one_that_holds_several(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "MIN_MOVE_SECONDS", 0.1)
    jobs = {"unlogged-1": 600, "unlogged-2": 590, "unlogged-3": 580, "a": 50, "b": 40}
    calm = make_run(tmp_path / "calm", jobs)
    make_driver(calm, cluster, RecordingDisplay(), workers=1, slots=5).run()
    run, display, counters = make_run(tmp_path / "run", jobs), RecordingDisplay(), DriverCounters()
    assert make_driver(run, cluster, display, slots=3, attempts=1, counters=counters).run() == "finished"
    assert counters.num_preemptions == {"migrated": 1}  # one of three, and not two
    assert {name: token_hash(run, name) for name in jobs} == {name: token_hash(calm, name) for name in jobs}
    moved = [result_metrics(run, name) for name in jobs if result_metrics(run, name)["num_attempts"] == 2]
    assert len(moved) == 1
    assert len(set(moved[0]["workers"])) == 2  # another worker goes on with it
    assert moved[0]["num_recovered_tokens"] == moved[0]["num_reported_tokens"] > 0


def test_a_job_that_is_nearly_done_stays_where_it_is(tmp_path: Path, cluster: Cluster) -> None:
    run, counters = make_run(tmp_path / "run", {"long-1": 300, "long-2": 290, "a": 50, "b": 40}), DriverCounters()
    assert make_driver(run, cluster, RecordingDisplay(), slots=2, counters=counters).run() == "finished"
    assert counters.num_preemptions == {}


def test_a_store_that_fails_a_worker_stops_the_run_and_blames_no_job(tmp_path: Path, cluster: Cluster) -> None:
    run, counters = make_run(tmp_path / "run", {"storeless": 400, "good": 400}), DriverCounters()
    with pytest.raises(StoreError, match="no answer for 120 s"):
        make_driver(run, cluster, RecordingDisplay(), attempts=1, counters=counters).run()
    assert counters.num_preemptions == {}
    assert not run.failed()
    progress = run.progress()
    assert progress is not None
    assert progress.state == "interrupted"
    assert set(progress.running) == {"storeless", "good"}


def test_attempts_carry_the_kind_of_numerics_they_ran_with(tmp_path: Path, cluster: Cluster) -> None:
    run = make_run(tmp_path / "run", {"a": 20})
    make_driver(run, cluster, RecordingDisplay(), workers=1).run()
    assert result_metrics(run, "a")["numerics"] == ["counting"]
