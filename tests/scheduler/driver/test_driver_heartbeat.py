from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from swiftbatch.jobs.input.rejects import Reject
from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.jobs.run.run import Run
from swiftbatch.metrics.counters import DriverCounters, EngineCounters
from swiftbatch.scheduler.cluster.ray_cluster import Cluster
from swiftbatch.scheduler.cluster.worker_actor import WorkerSpec
from swiftbatch.scheduler.driver.job_queue import JobQueue
from swiftbatch.scheduler.driver.run_lease import (
    AT_REST,
    BEAT_SECONDS,
    BEAT_SECONDS_OBJECT_STORE,
    STALE_SECONDS,
    RunLease,
    current_progress,
)
from swiftbatch.scheduler.driver.run_progress import ProgressCounter
from swiftbatch.scheduler.driver.worker_fleet import Fleet, Speed, Worker
from swiftbatch.worker.config import EngineConfig
from tests.scheduler.driver.driver_parts import make_context, make_run
from tests.simulated_clock import SimulatedClock


def make_fleet(run: Run) -> Fleet:
    return Fleet(
        WorkerSpec(EngineConfig(), run.store.uri), Cluster(is_embedded=True, num_gpus=0, watch=None), timeout=20
    )


def test_a_beat_says_what_the_queue_holds_and_who_writes_it(tmp_path: Path) -> None:
    run, queue = make_run(tmp_path / "run", {"a": 300}), JobQueue(5)
    queue.add(JobEntry("a-1", "a", 1, 3, 5))
    queue.take("w1", 0.0)
    queue.progress("a-1", 3)
    context = make_context(run, make_fleet(run), queue)
    now = time.monotonic()
    context.fleet.speed = Speed(now - 2.0)
    context.fleet.speed.add(4, now)
    with RunLease(run) as hold:
        hold.stop_beating()
        progress = hold.beat(state="running", running={"a": 3}, **ProgressCounter(context).take(now))
        assert run.progress() == progress
        claim = hold.epoch.claim
    assert (progress.epoch, progress.driver_host, progress.driver_pid) == (1, claim.host, claim.pid)
    assert (progress.started, progress.driver_process) == (claim.started, claim.process)
    assert progress.running == {"a": 3}
    assert progress.num_generated_tokens == 3
    assert progress.tokens_per_second == 2.0
    assert progress.eta_seconds == context.counters.eta_seconds == 1.0  # two of five tokens left


def test_while_most_jobs_replay_no_time_left_is_told(tmp_path: Path) -> None:
    run, queue = make_run(tmp_path / "run", {"a": 300}), JobQueue(5)
    for name in ("a", "b", "c"):
        queue.add(JobEntry(f"{name}-1", name, 1, 3, 500), 100)
        queue.take("w1", 0.0)
    context = make_context(run, make_fleet(run), queue)
    context.fleet.speed = Speed(0.0)
    counter = ProgressCounter(context)
    assert counter.take(1.0)["eta_seconds"] is None  # no sample
    context.fleet.speed.add(1, 2.0)
    queue.progress("a-1", 101)
    assert counter.take(2.0)["eta_seconds"] is None  # two of three still replay
    context.fleet.speed.add(60, 3.0)
    queue.progress("a-1", 130)
    queue.progress("b-1", 131)
    assert counter.take(3.0)["eta_seconds"] is not None


def test_a_beat_says_what_the_driver_and_all_its_workers_have_counted(tmp_path: Path) -> None:
    run, queue, counters = make_run(tmp_path / "run", {"a": 300}), JobQueue(5), DriverCounters()
    queue.add(JobEntry("a-1", "a", 1, 3, 5))
    queue.take("w1", 0.0)
    run.write_rejects([Reject(line_number, None, "odd") for line_number in range(1, 5)])
    context = make_context(run, make_fleet(run), queue, counters=counters)
    census = ProgressCounter(context)
    assert census.take(0.0)["mean_acceptance_length"] is None  # no step yet
    counters.take_in("w1", EngineCounters(num_steps=10, num_drafts=10, num_accepted_tokens=5, num_resumes={"kv": 1}))
    counters.take_in("w3", EngineCounters(num_tokens_by_draft={"chain": 30, "none": 2}, num_copied_tokens=7))
    counters.take_in("w2", EngineCounters(num_steps=10, num_drafts=30, num_accepted_tokens=35, num_resumes={"kv": 2}))
    counters.num_preemptions["worker_died"] += 1
    context.fleet.workers = [Worker(f"w{number}", actor=None, call=None) for number in range(3)]
    with RunLease(run) as hold:
        progress = hold.beat(state="running", running={}, **census.take(0.0))
    assert progress.mean_acceptance_length == 2.0  # 40 tokens accepted in 40 drafts
    assert progress.num_resumes == {"kv": 3}
    assert progress.num_tokens_by_draft == {"chain": 30, "none": 2}
    assert (progress.num_read_tokens, progress.num_copied_tokens) == (0, 7)
    assert progress.num_preemptions == {"worker_died": 1}
    assert (progress.num_starting_workers, progress.num_rejects) == (3, 4)
    assert (progress.max_tokens, progress.num_tokens_left) == ({"a": 5}, 5)


def test_an_object_store_gets_fewer_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, clock = make_run(tmp_path / "run", {"a": 300}), SimulatedClock()
    clock.rule(monkeypatch)
    with RunLease(run) as hold:
        for is_local, seconds in ((True, BEAT_SECONDS), (False, BEAT_SECONDS_OBJECT_STORE)):
            run.store.is_local = is_local
            hold.beat(state="running", jobs={}, num_generated_tokens=0, **AT_REST)
            assert not hold.is_due(clock.now + 0.9 * seconds)
            assert hold.is_due(clock.now + seconds)


def test_a_driver_of_many_workers_beats_as_often_as_they_report_and_long_before_it_seems_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, clock = make_run(tmp_path / "run", {"a": 300}), SimulatedClock()
    clock.rule(monkeypatch)
    with RunLease(run) as hold:
        for news_seconds, seconds in ((0.5, BEAT_SECONDS), (2.0, 2.0), (20.0, STALE_SECONDS / 3)):
            hold.beat(state="running", jobs={}, num_generated_tokens=0, **AT_REST)
            assert not hold.is_due(clock.now + 0.9 * seconds, news_seconds)
            assert hold.is_due(clock.now + seconds, news_seconds)


def test_a_stale_heartbeat_is_shown_as_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = make_run(tmp_path / "run", {"a": 300, "b": 300}), time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    assert current_progress(run).state == "interrupted"  # made, and never run
    beat = current_progress(run).model_copy(
        update={"state": "running", "driver_host": "elsewhere", "updated": now - STALE_SECONDS + 1, "driver_pid": 1}
    )
    run.write_progress(beat)
    assert current_progress(run).state == "running"
    run.write_progress(beat.model_copy(update={"updated": now - STALE_SECONDS - 1}))
    stale = current_progress(run)
    assert stale.state == "interrupted"
    assert stale.jobs["pending"] == 2


def test_a_dead_driver_of_this_machine_is_noticed_at_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"a": 300})
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    beat = current_progress(run).model_copy(
        update={"state": "running", "driver_host": os.uname().nodename, "updated": time.time(), "driver_pid": pid}
    )
    run.write_progress(beat)
    assert current_progress(run).state == "interrupted"
    run.write_progress(beat.model_copy(update={"driver_pid": os.getpid()}))
    assert current_progress(run).state == "running"
