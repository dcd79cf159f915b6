"""A lost worker's logs are moved before its jobs resume."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from swiftbatch.jobs.checkpoints.checkpoint_files import AttemptStart
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.token_log import WORKER_LOGS_FOLDER, PackedLogs, TokenLog
from swiftbatch.jobs.run.output_line import success_line
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.driver.attempt_numbers import Attempts
from swiftbatch.scheduler.driver.queue_loading import load_queue, put_logs_in_place
from swiftbatch.scheduler.driver.worker_fleet import Lost, Worker
from swiftbatch.scheduler.driver.worker_reports import AttemptSettlement, ReportIntake
from tests.jobs.run.run_parts import write_result
from tests.scheduler.driver.driver_parts import job_id, make_context, make_run

SECONDS = 60  # until a test gives up
TOKENS = np.arange(40, dtype=np.uint32)


def write_logs(run: Run, names: list[str], worker_id: str = "w1") -> None:
    logs = PackedLogs.of(run)
    start = AttemptStart(worker_id=worker_id, claimed=12.5, numerics="cpu", attempt=1)
    entries = [logs.entry(job_id(run, name), 1_000_001, start, TokenLog(TOKENS), None) for name in names]
    logs.write(f"{worker_id}-x-000001.logs", entries)


def test_a_lost_worker_s_jobs_wait_for_their_logs_and_go_on_from_them(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"a": 300, "b": 200})
    queue, fleet = load_queue(run, 5), object()
    unused: Any = fleet
    context = make_context(run, unused, queue)
    intake = ReportIntake(context, AttemptSettlement(context))
    worker = Worker("w1", None, None)
    assert [entry.name for _ in range(2) if (entry := queue.take("w1", 0.0))] == ["a", "b"]
    write_logs(run, ["a", "b"])
    write_logs(run, ["b"], "w12")
    intake.take_in(Lost(worker, "worker_died", "its process ended"))
    assert queue.counts()["running"] == 2  # nobody gets them before their logs are in place
    deadline = time.monotonic() + SECONDS
    while queue.counts()["running"] and time.monotonic() < deadline:
        intake.settle()
        time.sleep(0.01)
    assert queue.counts()["pending"] == 2
    assert [CheckpointStore.of(run).read_log(job_id(run, name)).token_ids.tolist() for name in "ab"] == [
        TOKENS.tolist()
    ] * 2
    assert run.store.list(WORKER_LOGS_FOLDER) == ["w12-x-000001.logs"]
    intake.stop()


def test_a_takeover_finds_the_logs_of_all_workers_that_the_last_driver_left(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"a": 300, "b": 200, "done": 3})
    write_logs(run, ["a", "done"])
    write_logs(run, ["b"], "w2")
    done = next(record for record in run.jobs() if record.job.name == "done")
    shown: dict[str, Any] = {"model": "none", "system_fingerprint": run.manifest.fingerprint, "token_ids": TOKENS}
    write_result(run, done.job_id, success_line(done, "run", "", "length", metrics={}, **shown))
    put_logs_in_place(run)
    attempts = Attempts(run.store, 2, {})
    queue = load_queue(run, 5, attempts)
    assert [queue.find(job_id(run, name)).num_generated_tokens for name in "ab"] == [40, 40]
    assert attempts.begin(job_id(run, "a")) == (2_000_001, 2)
    assert set(run.store.list("checkpoints")) <= {job_id(run, "a"), job_id(run, "b"), "workers"}
    assert run.store.list(WORKER_LOGS_FOLDER) == []


def test_what_a_killed_worker_has_left_half_written_goes_with_its_logs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"a": 300})
    write_logs(run, ["a"])
    half = tmp_path / "run" / WORKER_LOGS_FOLDER / f".w1-x-000002.logs.{'0' * 32}"
    half.write_bytes(b"half")
    put_logs_in_place(run)
    assert half.exists()  # an earlier driver's worker may still be writing it
    put_logs_in_place(run, have_all_gone=True)
    assert not half.exists()
    half.write_bytes(b"half")
    os.utime(half, (0, 0))
    put_logs_in_place(run)
    assert not half.exists()
    assert CheckpointStore.of(run).read_log(job_id(run, "a")).token_ids.tolist() == TOKENS.tolist()
