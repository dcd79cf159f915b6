"""The driver on a real Ray whose workers are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.output_line import line_id
from swiftbatch.jobs.run.run_records import Progress
from swiftbatch.jobs.run.shards import ShardSettings, ask_for_shards
from swiftbatch.metrics.counters import DriverCounters
from swiftbatch.scheduler.cluster.ray_cluster import Cluster
from swiftbatch.scheduler.driver.driver import DriverError
from swiftbatch.scheduler.driver.run_lease import current_progress
from tests.jobs.run.run_parts import write_result
from tests.jobs.shards.shard_parts import all_rows, files, job_ids
from tests.scheduler.driver.driver_parts import (
    RecordingDisplay,
    assert_undisturbed,
    job_id,
    make_driver,
    make_run,
    result_metrics,
)


def test_all_jobs_finish_and_leave_no_checkpoint_and_shards_are_written_while_others_run(
    tmp_path: Path, cluster: Cluster
) -> None:
    run = make_run(tmp_path / "run", {"long": 1000} | {f"job-{number}": 10 for number in range(7)})
    display, seen = RecordingDisplay(), dict[str, bytes]()
    ask_for_shards(run.store, ShardSettings.parse("jsonl:3"))
    display.on_update = lambda progress: seen.update(files(run.store)) if "long" in progress.running else None
    assert make_driver(run, cluster, display).run() == "finished"
    assert run.ended()[0] == {record.job_id for record in run.jobs()}
    progress = display.updates[-1]
    assert progress.jobs == {"pending": 0, "running": 0, "finished": 8, "failed": 0, "cancelled": 0}
    assert progress.num_generated_tokens == 1070
    assert not run.store.list("checkpoints")
    assert list(seen) == ["train-00000.jsonl", "train-00001.jsonl"]
    assert {name: files(run.store)[name] for name in seen} == seen
    assert [note for note in display.notes if note.startswith("shard ")] == [
        f"shard shards/data/train-0000{number}.jsonl is there: {num_rows} rows"
        for number, num_rows in enumerate((3, 3, 2))
    ]
    assert sorted(job_ids(all_rows(run.store))) == sorted(record.job_id for record in run.jobs())


def test_a_killed_workers_jobs_resume_elsewhere_with_the_same_tokens(tmp_path: Path, cluster: Cluster) -> None:
    jobs = {"a": 300, "b": 300, "c": 60}
    run, display, counters = make_run(tmp_path / "run", jobs), RecordingDisplay(), DriverCounters()
    killed: list[tuple[int, tuple[str, ...]]] = []

    def kill_one(progress: Progress) -> None:
        busy = [worker for worker in progress.workers if worker.jobs]
        if not killed and busy and progress.num_generated_tokens > 100:
            os.kill(busy[0].pid, signal.SIGKILL)
            killed.append((busy[0].pid, busy[0].jobs))

    display.on_update = kill_one
    assert make_driver(run, cluster, display, counters=counters).run() == "finished"
    assert killed
    assert_undisturbed(run, jobs)
    (victim,) = killed[0][1]
    assert result_metrics(run, victim)["num_attempts"] == 2
    assert result_metrics(run, victim)["num_recovered_tokens"] > 0
    assert counters.num_preemptions["worker_died"] == 1  # a job may also have moved to the new worker
    assert any(note.startswith("worker w") and "is lost" in note for note in display.notes)


def test_a_failing_job_is_given_up_with_its_reason_and_the_others_finish(tmp_path: Path, cluster: Cluster) -> None:
    run = make_run(tmp_path / "run", {"fails-always": 50, "refused": 50, "good": 50})
    counters = DriverCounters()
    state = make_driver(run, cluster, RecordingDisplay(), workers=1, attempts=2, counters=counters).run()
    assert state == "finished"
    assert run.ended()[0] == {job_id(run, "good")}
    error = run.error(job_id(run, "fails-always"))
    assert error["error"]["code"] == "attempts_failed"
    assert "after 2 attempts" in error["error"]["message"]
    assert "it always fails" in error["error"]["message"]
    assert counters.num_preemptions == {"attempt_failed": 2}
    refused = run.error(job_id(run, "refused"))
    assert refused["error"] == {"code": "logits_not_finite", "message": "given up: its numbers are none"}  # no retries
    assert counters.jobs_finished == {"failed": 2}


def test_a_job_that_kills_its_workers_takes_no_neighbour_with_it(tmp_path: Path, cluster: Cluster) -> None:
    run = make_run(tmp_path / "run", {"kills-workers": 1000, "a": 900, "b": 30})
    assert make_driver(run, cluster, RecordingDisplay(), workers=1, slots=3, attempts=3).run() == "finished"
    assert run.ended()[0] == {job_id(run, "a"), job_id(run, "b")}
    assert "its process ended" in run.error(job_id(run, "kills-workers"))["error"]["message"]


def test_one_cancelled_job_ends_and_the_others_finish(tmp_path: Path, cluster: Cluster) -> None:
    run, display = make_run(tmp_path / "run", {"endless": 100_000, "waits": 90_000, "good": 50}), RecordingDisplay()

    def cancel(progress: Progress) -> None:
        if progress.num_generated_tokens > 20 and progress.state == "running":
            run.request_cancel(job_id(run, "endless"))
            run.request_cancel(job_id(run, "waits"))

    display.on_update = cancel
    assert make_driver(run, cluster, display, workers=1).run() == "finished"
    assert display.updates[-1].jobs["cancelled"] == 2
    assert run.ended()[0] == {job_id(run, "good")}
    assert run.cancel_requests() == (False, set())


def test_a_cancelled_run_ends_with_every_job_accounted_for(tmp_path: Path, cluster: Cluster) -> None:
    run, display = make_run(tmp_path / "run", {"a": 100_000, "b": 100_000, "c": 100_000}), RecordingDisplay()

    def cancel(progress: Progress) -> None:
        if progress.num_generated_tokens > 20 and progress.state == "running":
            run.request_cancel(None)

    display.on_update = cancel
    assert make_driver(run, cluster, display, workers=1, slots=2).run() == "cancelled"
    assert run.ended()[1] == {record.job_id for record in run.jobs()}
    assert run.cancel_requests() == (False, set())


def test_a_result_in_the_store_counts_though_the_report_was_lost(tmp_path: Path, cluster: Cluster) -> None:
    run, display = make_run(tmp_path / "run", {"a": 100_000}), RecordingDisplay()
    other = make_run(tmp_path / "other", {"a": 30})
    make_driver(other, cluster, RecordingDisplay(), workers=1).run()
    late = other.result(job_id(other, "a"))
    late["id"] = line_id(job_id(run, "a"))

    def finish_behind_its_back(progress: Progress) -> None:
        if progress.num_generated_tokens > 20 and progress.workers:
            write_result(run, job_id(run, "a"), late)
            os.kill(progress.workers[0].pid, signal.SIGKILL)

    display.on_update = finish_behind_its_back
    assert make_driver(run, cluster, display, workers=1).run() == "finished"
    assert display.updates[-1].jobs["finished"] == 1
    assert display.updates[-1].num_generated_tokens == 30


def test_workers_that_never_start_end_the_run_with_the_reason(tmp_path: Path, cluster: Cluster) -> None:
    run = make_run(tmp_path / "run", {"a": 10})
    with pytest.raises(DriverError, match="no worker starts, 3 tries: MemoryError: no room for the model"):
        make_driver(run, cluster, RecordingDisplay(), workers=1, session="BrokenSession").run()
    assert current_progress(run).state == "interrupted"
    assert current_progress(run).jobs["pending"] == 1
    assert "worker process" in (tmp_path / "run/logs/w1.log").read_text()


def test_a_model_that_a_worker_refuses_ends_the_run_at_the_first_one_in_one_line(
    tmp_path: Path, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    run, display = make_run(tmp_path / "run", {"a": 10}), RecordingDisplay()
    with pytest.raises(ModelError, match=r"^model counting: it can't count$"):
        make_driver(run, cluster, display, session="RefusingSession").run()
    assert sum("is lost" in note for note in display.notes) <= 2  # both started at once
    assert current_progress(run).jobs["pending"] == 1
    time.sleep(1.0)  # Ray would print a lost worker that nobody waits for
    assert "Traceback" not in capfd.readouterr().err


def test_a_worker_with_another_model_ends_the_run_though_others_have_the_right_one(
    tmp_path: Path, cluster: Cluster
) -> None:
    run, display = make_run(tmp_path / "run", {"a": 100_000}), RecordingDisplay()

    def kill_the_first(progress: Progress) -> None:
        if progress.num_generated_tokens and progress.workers and progress.workers[0].id == "w1":
            with contextlib.suppress(ProcessLookupError):
                os.kill(progress.workers[0].pid, signal.SIGKILL)

    display.on_update = kill_the_first
    with pytest.raises(DriverError, match=r"^model counting: its weights are not the file that was expected$"):
        make_driver(run, cluster, display, workers=1, session="OtherModelSession").run()
    assert sum("is lost" in note for note in display.notes) == 2  # the killed one, and its replacement
    assert current_progress(run).jobs["pending"] == 1


def test_what_other_workers_have_is_kept_when_one_with_another_model_ends_the_run(
    tmp_path: Path, cluster: Cluster
) -> None:
    run = make_run(tmp_path / "run", {"a": 100_000, "b": 100_000})
    with pytest.raises(DriverError, match="not the file that was expected"):
        make_driver(run, cluster, RecordingDisplay(), workers=2, session="OtherModelSession").run()
    assert current_progress(run).jobs == current_progress(run).jobs | {"pending": 2, "running": 0}


def test_the_embedded_ray_has_no_process_that_nobody_asks(cluster: Cluster) -> None:
    import ray

    started = set(ray._private.worker._global_node.all_processes)
    assert {"gcs_server", "raylet"} <= started
    assert not started & {"monitor", "log_monitor", "dashboard"}
    [raylet] = (info.process for info in ray._private.worker._global_node.all_processes["raylet"])
    children = Path(f"/proc/{raylet.pid}/task/{raylet.pid}/children").read_text().split()
    assert not [pid for pid in children if b"Agent" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.slow
def test_the_embedded_ray_lets_no_stranger_in(cluster: Cluster) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    program = f"import ray; ray.init(address={address!r}); print('inside')"
    command = [sys.executable, "-c", program]
    stranger = {"RAY_AUTH_MODE": "disabled"}
    process = subprocess.run(command, env=environment | stranger, capture_output=True, text=True, timeout=300)
    assert process.returncode != 0
    assert "inside" not in process.stdout
    friend = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "inside" in friend.stdout, friend.stderr
