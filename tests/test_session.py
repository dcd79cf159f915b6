"""A worker's session: results in the run folder, checkpoints on the way, one job's fault for that job alone."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import numpy as np
import pytest
from run_parts import MANIFEST

from jobs.checkpoints import CheckpointStore
from jobs.job import Job, JobRecord
from jobs.run import Run
from jobs.sampling import SamplingParams
from worker.config import EngineConfig
from worker.session import WorkerSession
from worker.work import Assignment, WorkReport

NUM_TOKENS = 120
HUGE = SamplingParams(max_tokens=2**31 - 1, seed=1)  # its cache would take terabytes


def record(custom_id: str, **changes: object) -> JobRecord:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=3, ignore_eos=True, repetition_penalty=1.1)
    fields: dict[str, object] = {"prompt": f"the quick brown {custom_id}", **changes}
    job = Job(custom_id=custom_id, url="/v1/completions", sampling=sampling, **fields)  # type: ignore[arg-type]
    return JobRecord(job.job_id("f"), job, 1, 5)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create_or_open(str(tmp_path / "run"), MANIFEST)


def session(run: Run, model: Path, engine: str = "token-recycling", metrics_port: int | None = None) -> WorkerSession:
    config = EngineConfig(model=str(model), engine=engine, num_threads=2, num_slots=3, checkpoint_seconds=0.01)
    return WorkerSession(config, run.store.uri, "w0", metrics_port)


def to_the_end(worker: WorkerSession, *assignments: Assignment) -> WorkReport:
    """Work until nothing runs; returns the sum of what ended."""
    report = worker.work(assignments, 0.05)
    finished, failed = list(report.finished), list(report.failed)
    while report.progress:
        report = worker.work([], 0.05)
        finished += report.finished
        failed += report.failed
    return WorkReport(finished=tuple(finished), failed=tuple(failed))


def digest(run: Run, job: JobRecord) -> str:
    line = run.result(job.job_id)
    assert line is not None
    return str(line["response"]["body"]["choices"][0]["token_ids_sha256"])


def test_finished_jobs_have_results_and_no_checkpoints(run: Run, tiny_model: Path) -> None:
    jobs = [record("fox"), record("dog")]
    report = to_the_end(session(run, tiny_model), *(Assignment(job, 1) for job in jobs))
    assert {progress.job_id for progress in report.finished} == run.finished() == {job.job_id for job in jobs}
    assert run.store.list("checkpoints") == []
    body = run.result(jobs[0].job_id)["response"]["body"]  # type: ignore[index]
    assert body["usage"]["completion_tokens"] == NUM_TOKENS
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["metrics"]["mean_acceptance_length"] >= 1


@pytest.mark.parametrize("engine", ["autoregressive", "suffix", "token-recycling"])
def test_a_lost_worker_s_job_goes_on_elsewhere_with_the_same_tokens(
    run: Run, tiny_model: Path, tmp_path: Path, engine: str
) -> None:
    undisturbed = Run.create_or_open(str(tmp_path / "other"), MANIFEST)
    job = record("fox")
    to_the_end(session(undisturbed, tiny_model, "autoregressive"), Assignment(job, 1))

    checkpoints = CheckpointStore(run.store)
    lost = session(run, tiny_model, engine)
    attempt = checkpoints.claim(job.job_id, "w0")
    while not 20 < len(checkpoints.read_tokens(job.job_id)) < NUM_TOKENS:
        lost.work([Assignment(job, attempt)] if not lost.engine.sequences else [], 0.005)
    del lost  # its process died: nothing was said, nothing tidied up

    successor = session(run, tiny_model, engine)
    attempt = checkpoints.claim(job.job_id, "w1")
    to_the_end(successor, Assignment(job, attempt, num_reported_tokens=NUM_TOKENS))
    assert digest(run, job) == digest(undisturbed, job)
    counters = successor.engine.counters
    assert counters.num_resumes == {"replay": 1}
    assert counters.num_tokens_recovered > 20
    assert counters.num_tokens_recovered + counters.num_tokens_recomputed == NUM_TOKENS


def test_a_drafter_state_that_does_not_fit_is_left_out(
    run: Run, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = record("fox")
    checkpoints = CheckpointStore(run.store)
    checkpoints.claim(job.job_id, "w0")
    checkpoints.write_state(job.job_id, 1, 4, {"recycling_ids": np.zeros((3, 3), dtype=np.int32)})
    report = to_the_end(session(run, tiny_model), Assignment(job, 2))
    assert [progress.job_id for progress in report.finished] == [job.job_id]
    assert "drafter state" in caplog.text


def test_one_job_s_fault_fails_that_job_alone(run: Run, tiny_model: Path) -> None:
    huge = JobRecord("huge-1", record("dog").job.model_copy(update={"sampling": HUGE}), 2, 5)
    good = record("fox")
    report = to_the_end(session(run, tiny_model), Assignment(huge, 1), Assignment(good, 1))
    assert [progress.job_id for progress in report.finished] == [good.job_id]
    [(job_id, reason)] = report.failed
    assert job_id == "huge-1"
    assert "allocate" in reason


def test_cancelled_jobs_are_dropped_without_a_result(run: Run, tiny_model: Path) -> None:
    worker = session(run, tiny_model)
    fox, dog = record("fox"), record("dog")
    worker.work([Assignment(fox, 1), Assignment(dog, 1)], 0.0)
    worker.cancel([fox.job_id, "unknown"])
    report = to_the_end(worker)
    assert [progress.job_id for progress in report.finished] == [dog.job_id]
    assert run.finished() == {dog.job_id}


def test_the_metrics_endpoint_shows_what_was_generated(run: Run, tiny_model: Path) -> None:
    worker = session(run, tiny_model, metrics_port=0)
    to_the_end(worker, Assignment(record("fox"), 1))
    with urllib.request.urlopen(str(worker.metrics_address), timeout=5) as page:
        text = page.read().decode()
    assert "swiftbatch_generation_tokens_total{" in text
    assert f" {NUM_TOKENS}.0" in text
