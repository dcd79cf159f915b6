from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from swiftbatch.jobs.checkpoints.checkpoint_files import MAX_MARKS, Timeline, TimelineRecorder
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.checkpoint_writer import CheckpointWriter
from swiftbatch.jobs.storage.store import Store
from swiftbatch.metrics.report.attempts import job_pace
from swiftbatch.scheduler.driver.queue_loading import put_logs_in_place
from swiftbatch.worker.session.work_messages import Orders
from tests.jobs.checkpoints.checkpoint_parts import FINGERPRINT, JOB, Cache, claim, output_ids, tokens_at
from tests.jobs.storage.slow_store import GatedStore
from tests.metrics.report_parts import facts_of, timeline
from tests.scheduler.driving import wait_until
from tests.worker.session.session_parts import body, claimed, make_run, record, session, to_the_end, until


def test_marks_stay_few_and_even_however_long_an_attempt_runs() -> None:
    recorder = TimelineRecorder()
    assert recorder.take() is None
    for step in range(200_000):
        recorder.note(5.0 + step / 10, 1000.0 + step / 10, 3 * step, step, 2 * step)
        if step in (0, 7, 100, 5000, 199_999):
            kept = recorder.take()
            assert kept.started == 1000.0
            assert 1 <= len(kept.seconds) <= MAX_MARKS
            assert kept.seconds[0] == 0
            assert kept.seconds[-1] == pytest.approx(step / 10)
            assert kept.num_tokens == tuple(round(30 * seconds) for seconds in kept.seconds)
            assert kept.num_accepted_tokens == tuple(2 * drafts for drafts in kept.num_drafts)
            gaps = [after - before for before, after in zip(kept.seconds, kept.seconds[1:], strict=False)]
            assert not gaps or max(gaps) <= max(1.01, kept.seconds[-1] / 30)


def test_a_timeline_is_due_when_there_is_a_new_mark_and_not_at_every_step() -> None:
    recorder = TimelineRecorder()
    assert not recorder.has_news
    num_due = 0
    for step in range(100_000):
        recorder.note(step / 100, step / 100, step, 0, 0)
        if recorder.has_news:
            recorder.take()
            num_due += 1
    assert 60 < num_due < 400  # of 1,000 seconds


@pytest.mark.parametrize("change", [{"seconds": (0.0,)}, {"num_tokens": (1, 2, 3)}, {"started": float("nan")}])
def test_a_timeline_with_columns_that_do_not_fit_is_refused(change: dict[str, object]) -> None:
    whole = {"started": 1.0, "seconds": (0.0, 1.0), "num_tokens": (1, 2), "num_drafts": (0, 0)}
    whole["num_accepted_tokens"] = (0, 0)
    Timeline.model_validate(whole)
    with pytest.raises(ValueError, match=r"found|finite"):
        Timeline.model_validate(whole | change)


def test_timelines_are_written_after_all_token_logs_and_before_any_state(tmp_path: Path) -> None:
    store = GatedStore(str(tmp_path))
    writer = CheckpointWriter(CheckpointStore(store, FINGERPRINT), 100, lambda *_: None)
    for job_id in "ab":
        writer.open(job_id, 1, "suffix", Cache())
        writer.put_timeline(job_id, timeline(9.0, 5.0, 0, 10))
        writer.put_state(job_id, tokens_at(0, 20), {})
    assert store.is_waiting.wait(60)  # a's timeline, which nothing precedes
    for job_id in "ab":
        writer.put_tokens(job_id, output_ids(16))
    store.open_gate()
    assert writer.flush(60)
    writer.stop()
    names = [path.replace("/0001/", ":") for path in store.written]
    assert names[0] == "a:timeline.json"
    assert set(names[1:3]) == {"a:tokens.bin", "b:tokens.bin"}
    assert names[3] == "b:timeline.json"
    assert set(names[4:6]) == {"a:kv-0-20.arrow", "b:kv-0-20.arrow"}


def test_a_damaged_timeline_is_named_and_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(str(tmp_path))
    checkpoints = CheckpointStore(store, FINGERPRINT)
    kept = timeline(9.0, 5.0, 0, 10)
    for number in (1, 2):
        assert claim(checkpoints, JOB, "w1") == number
        checkpoints.write_timeline(JOB, number, kept)
    path = f"checkpoints/{JOB}/0001/timeline.json"
    store.write(path, store.read(path).replace(b"9.0", b"8.0"))
    first, second = checkpoints.history(JOB)
    assert (first.worker_id, first.timeline) == ("w1", None)
    assert second.timeline == kept
    [problem] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert path in problem


def test_a_result_tells_the_marks_of_every_attempt(tmp_path: Path, tiny_model: Path) -> None:
    run, job = make_run(tmp_path / "run"), record("fox")
    run.add_jobs([job])
    before = time.time()
    killed = session(run, tiny_model)
    until(killed, job, 80, claimed(run, job))
    moved = session(run, tiny_model)
    num_released = until(moved, job, 160, claimed(run, job))
    moved.work(Orders(released=(job.job_id,)), 0.0)
    killed.drain(60.0)  # it writes only its own attempt's files
    to_the_end(session(run, tiny_model), claimed(run, job, num_released))
    metrics = body(run, job)["metrics"]
    first, second, third = (Timeline.model_validate(a["timeline"], strict=False) for a in metrics["attempts"])
    assert (second.is_released, third.is_released) == (True, False)
    assert second.num_tokens[-1] == num_released
    assert third.num_tokens[0] > num_released
    assert third.num_tokens[-1] == body(run, job)["usage"]["completion_tokens"]
    assert (third.num_drafts[-1], third.num_accepted_tokens[-1]) == (
        metrics["num_drafts"],
        metrics["num_accepted_tokens"],
    )
    for kept in (first, second, third):
        assert before < kept.started < time.time()
        assert list(kept.num_tokens) == sorted(kept.num_tokens)
    [facts] = facts_of(run).jobs
    assert [attempt.outcome for attempt in facts.attempts][1:] == ["released", "finished"]
    seconds = sum(kept.seconds[-1] for kept in (first, second, third))  # without prompts and replays
    num_tokens = sum(kept.num_tokens[-1] - kept.num_tokens[0] for kept in (first, second, third))
    assert metrics["ms_per_token"] == pytest.approx(1000 * seconds / num_tokens, abs=0.001)
    assert job_pace(facts)[1] == pytest.approx(metrics["ms_per_token"], rel=0.05)
    assert job.job_id not in run.store.list("checkpoints")


def test_a_killed_attempt_leaves_its_marks(tmp_path: Path, tiny_model: Path) -> None:
    run, job = make_run(tmp_path / "run"), record("fox")
    run.add_jobs([job])
    worker = session(run, tiny_model, checkpoint_seconds=0.01)
    until(worker, job, 100, claimed(run, job))
    checkpoints = CheckpointStore.of(run)
    wait_until(lambda: run.store.list("checkpoints/workers"))
    [attempt] = facts_of(run).jobs[0].attempts  # as in a report while its worker continues
    assert (attempt.worker_id, attempt.marks is None) == ("w0", False)
    put_logs_in_place(run)
    [begun] = checkpoints.history(job.job_id)  # the worker is not asked to write any more
    assert not begun.timeline.is_released
    assert begun.timeline.num_tokens[-1] <= len(checkpoints.read_log(job.job_id).token_ids)
    [attempt] = facts_of(run).jobs[0].attempts
    assert attempt.outcome == "lost"
