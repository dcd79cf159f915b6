"""What the driver's heartbeat says of a run, and what is made of one that has stopped."""

from __future__ import annotations

import os
import time
from pathlib import Path

from jobs.run.records import DriverClaim
from metrics.counters import DriverCounters, EngineCounters
from scheduler.driver.heartbeat import BEAT_SECONDS, BEAT_SECONDS_OBJECT_STORE, Heartbeat, current_progress
from scheduler.driver.job_queue import JobQueue
from tests.jobs.run.run_parts import make_record
from tests.scheduler.driver.driver_parts import make_run

CLAIM = DriverClaim(host="here", pid=7, driver_id="d", started=1000.0)


def test_a_beat_says_what_the_queue_holds_and_who_writes_it(tmp_path: Path) -> None:
    run, queue = make_run(tmp_path / "run", {"a": 300}), JobQueue(5)
    queue.add(make_record("a"))
    queue.take("w1", 0.0)
    queue.progress(make_record("a").job_id, 3)
    progress = Heartbeat(run, 4, CLAIM).beat("running", queue, {"a": 3}, 2.0, (), DriverCounters())
    assert run.progress() == progress
    assert (progress.epoch, progress.driver_host, progress.driver_pid, progress.started) == (4, "here", 7, 1000.0)
    assert progress.running == {"a": 3}
    assert progress.num_generated_tokens == 3
    assert progress.eta_seconds == 1.0  # two of five tokens left


def test_a_beat_says_what_the_driver_and_all_its_workers_have_counted(tmp_path: Path) -> None:
    run, queue, counters = make_run(tmp_path / "run", {"a": 300}), JobQueue(5), DriverCounters()
    queue.add(make_record("a"))
    queue.take("w1", 0.0)
    first = Heartbeat(run, 1, CLAIM).beat("running", queue, {}, 0.0, (), counters)
    assert first.mean_acceptance_length is None  # no step yet
    counters.take_in("w1", EngineCounters(num_steps=10, num_drafts=10, num_accepted_tokens=5, num_resumes={"kv": 1}))
    counters.take_in("w2", EngineCounters(num_steps=10, num_drafts=30, num_accepted_tokens=35, num_resumes={"kv": 2}))
    counters.count_preemption("worker_died")
    counters.workers = {"starting": 3}
    progress = Heartbeat(run, 1, CLAIM, num_rejects=4).beat("running", queue, {}, 0.0, (), counters)
    assert progress.mean_acceptance_length == 2.0  # 40 tokens accepted in 40 drafts
    assert progress.num_resumes == {"kv": 3}
    assert progress.num_preemptions == {"worker_died": 1}
    assert (progress.num_starting_workers, progress.num_rejects) == (3, 4)
    assert (progress.max_tokens, progress.num_tokens_left) == ({"a": 5}, 5)


def test_an_object_store_gets_fewer_beats(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"a": 300})
    for is_local, seconds in ((True, BEAT_SECONDS), (False, BEAT_SECONDS_OBJECT_STORE)):
        run.store.is_local = is_local
        heartbeat = Heartbeat(run, 1, CLAIM)
        assert heartbeat.is_due(time.monotonic())
        heartbeat.beat("running", JobQueue(5), {}, 0.0, (), DriverCounters())
        assert not heartbeat.is_due(time.monotonic() + 0.9 * seconds)
        assert heartbeat.is_due(time.monotonic() + 1.1 * seconds)


def test_a_stale_heartbeat_is_shown_as_interrupted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"a": 300, "b": 300})
    assert current_progress(run).state == "interrupted"  # made, and never run
    beat = current_progress(run).model_copy(
        update={"state": "running", "driver_host": "elsewhere", "updated": time.time() - 3, "driver_pid": 1}
    )
    run.write_progress(beat)
    assert current_progress(run).state == "running"
    run.write_progress(beat.model_copy(update={"updated": time.time() - 20}))
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
