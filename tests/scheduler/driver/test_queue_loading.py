"""The state of a run folder as a new driver finds it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs
from swiftbatch.jobs.checkpoints.token_log import TokenLog
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.output_line import error_line, success_line
from swiftbatch.jobs.run.result_files import SEGMENTS
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.local_folder import LocalFolder
from swiftbatch.scheduler.driver.attempt_numbers import Attempts
from swiftbatch.scheduler.driver.queue_loading import count_jobs, load_queue, put_logs_in_place, write_cancelled
from swiftbatch.scheduler.driver.worker_reports import AttemptSettlement
from tests.jobs.checkpoints.checkpoint_parts import claim
from tests.jobs.run.run_parts import MANIFEST, PROGRESS, make_record, write_result
from tests.scheduler.driver.driver_parts import make_context


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run.planned(str(tmp_path), MANIFEST).made()
    run.add_jobs([make_record(name, line_number) for line_number, name in enumerate("abcdef", start=1)])
    return run


def finish(run: Run, record: JobRecord, num_tokens: int) -> None:
    ids = np.zeros(num_tokens, np.uint32)
    write_result(
        run,
        record.job_id,
        success_line(
            record, "r", "t", "stop", model="m", system_fingerprint=run.manifest.fingerprint, token_ids=ids, metrics={}
        ),
    )


def log_tokens(run: Run, record: JobRecord, num_tokens: int) -> None:
    checkpoints = CheckpointStore.of(run)
    attempt = claim(checkpoints, record.job_id, "w1")
    checkpoints.write_tokens(record.job_id, attempt, np.zeros(num_tokens, np.uint32))


def test_every_job_is_counted_where_it_stands(run: Run) -> None:
    a, b, c, d, e, f = run.jobs()
    finish(run, a, 4)
    finish(run, b, 5)
    run.write_error(b.job_id, error_line(b, "attempts_failed", "a late result makes up for it"))
    run.write_error(c.job_id, error_line(c, "attempts_failed", "its workers died"))
    write_cancelled(run, [run.job_index().entry(3)])
    assert run.job_index().entry(3).job_id == d.job_id
    log_tokens(run, e, 3)
    queue = load_queue(run, 5)
    counts = {"pending": 2, "running": 0, "finished": 2, "failed": 1, "cancelled": 1}
    assert queue.counts() == count_jobs(run) == counts
    assert queue.unfinished() == [e.job_id, f.job_id]
    assert queue.num_generated_tokens == 4 + 5 + 3
    assert queue.num_tokens_left == 2 + 5


def test_attempts_at_jobs_that_finished_since_they_were_counted_are_forgotten(run: Run) -> None:
    """The last driver was killed before it knew of a result."""
    a, b, c, *_ = run.jobs()
    finish(run, a, 4)
    run.write_error(b.job_id, error_line(b, "attempts_failed", "its workers died"))
    attempts = Attempts(run.store, 2, {a.job_id: 1, b.job_id: 5, c.job_id: 2})
    load_queue(run, 5, attempts)
    assert set(attempts.counted()) == {b.job_id, c.job_id}


def test_cancelled_jobs_are_written_several_at_a_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for a store: one by one, a hundred thousand took twenty minutes."""
    write, meeting = LocalFolder.write, threading.Barrier(2, timeout=60)

    def beside_another(folder: LocalFolder, path: str, data: bytes) -> None:
        meeting.wait()
        write(folder, path, data)

    monkeypatch.setattr(LocalFolder, "write", beside_another)
    write_cancelled(run, run.job_index().entries())
    assert count_jobs(run)["cancelled"] == 6


def test_tokens_of_the_last_heartbeat_count_as_reported_though_no_log_has_them(run: Run) -> None:
    a, b, c, *_ = run.jobs()
    log_tokens(run, a, 3)
    log_tokens(run, b, 4)
    finish(run, c, 5)
    run.write_progress(PROGRESS.model_copy(update={"running": {"a": 4, "b": 1, "c": 2, "gone": 9}}))
    queue = load_queue(run, 5)
    assert [queue.find(record.job_id).num_generated_tokens for record in (a, b)] == [4, 4]
    assert queue.num_generated_tokens == 4 + 4 + 5


def test_a_fresh_run_is_taken_up_without_a_look_at_each_job(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def watched(method: Callable[[LocalFolder, str], object]) -> Callable[[LocalFolder, str], object]:
        return lambda folder, path: seen.append(path) or method(folder, path)

    for name in ("read", "exists", "list"):
        monkeypatch.setattr(LocalFolder, name, watched(getattr(LocalFolder, name)))
    a, *_ = run.jobs()
    seen.clear()
    assert load_queue(run, 5).num_unfinished == 6
    assert not [path for path in seen if a.job_id in path], seen
    finish(run, a, 4)
    seen.clear()
    assert load_queue(run, 5).num_unfinished == 5
    assert [path for path in seen if "results/" in path] == [f"{SEGMENTS}/{a.job_id}.seg"]


def test_attempts_that_were_lost_without_progress_count_over_drivers(run: Run) -> None:
    kills, moves, *_ = [record.job_id for record in run.jobs()]
    first = Attempts.read(run.store, 1)
    queue = load_queue(run, 3, first)
    settlement = AttemptSettlement(make_context(run, None, queue, tries=first))
    for job_id in (kills, moves) * 2:
        first.begin(job_id)
        settlement.put_back(job_id, "worker_died", "gone")
    first.end()
    log_tokens(run, run.jobs()[1], 5)
    queue = load_queue(run, 3, Attempts.read(run.store, 2))
    assert queue.find(kills).strikes.num == 2
    assert not queue.lose(kills, 0.0), "it had two attempts with the first driver, and has had the third"
    assert queue.find(moves).strikes.num == 0
    assert queue.lose(moves, 0.0)


def test_checkpoints_that_a_finished_job_has_left_go_unless_it_may_be_extended(run: Run) -> None:
    left, extendable, running, *_ = run.jobs()
    for record in (left, extendable, running):
        log_tokens(run, record, 3)
    finish(run, left, 4)
    finish(run, extendable, 4)
    KeptLogs.of(run).write(extendable.job_id, TokenLog(np.zeros(4, np.uint32)))
    put_logs_in_place(run)
    assert run.store.list("checkpoints") == sorted([extendable.job_id, running.job_id])
