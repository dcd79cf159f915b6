"""When a worker's results are written, and what must stay until then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tenacity import wait_random_exponential

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.run.result_files import SEGMENTS
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.retries import Retries
from swiftbatch.jobs.storage.store import Store, StoreError
from swiftbatch.worker.session import result_writer
from swiftbatch.worker.session.result_writer import Sealing
from tests.jobs.checkpoints.checkpoint_parts import claim
from tests.jobs.run.run_parts import FINISHED, MANIFEST
from tests.jobs.storage.fault_proxy import FaultProxy

NEVER = (1e9, 10**9)  # seconds and tokens


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    checkpoints = CheckpointStore.of(run)
    for job_id in "abc":
        checkpoints.write_tokens(job_id, claim(checkpoints, job_id, "w1"), np.arange(5, dtype=np.uint32))
    return run


def test_a_job_finishes_and_loses_its_checkpoints_when_its_segment_is_there_and_not_before(run: Run) -> None:
    results = Sealing(run, "w1", *NEVER)
    results.add("a", FINISHED, clears=True)
    results.add("b", FINISHED, clears=False)
    results.seal_due()
    assert results.sealed() == []
    assert run.ended()[0] == set()
    assert run.store.list("checkpoints") == ["a", "b", "c"]
    assert [progress.job_id for progress in results.flush()] == ["a", "b"]
    assert run.ended()[0] == {"a", "b"}
    assert run.store.list("checkpoints") == ["b", "c"]
    assert len(run.store.list(SEGMENTS)) == 1
    assert results.flush() == results.sealed() == []


@pytest.mark.parametrize("due", ["old", "long", "many", "large"])
def test_results_are_written_once_they_are_old_long_many_or_large(
    run: Run, due: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = (0.0 if due == "old" else 1e9, FINISHED["response"]["body"]["usage"]["completion_tokens"])
    monkeypatch.setattr(result_writer, "MOST_RESULTS", 2 if due == "many" else 1000)
    monkeypatch.setattr(result_writer, "MOST_BYTES", 10 if due == "large" else 2**20)
    results = Sealing(run, "w1", *(limits if due in ("old", "long") else NEVER))
    for job_id in "ab":
        results.add(job_id, FINISHED, clears=True)
    results.seal_due()
    results.add("c", FINISHED, clears=True)
    monkeypatch.setattr(Sealing, "seal", lambda _: None)  # only what is under way
    assert [progress.job_id for progress in results.flush()] == ["a", "b"]


def test_two_lives_of_a_worker_never_give_segments_the_same_name(run: Run) -> None:
    for _ in range(2):
        results = Sealing(run, "w1", *NEVER)
        for job_id in "ab":
            results.add(job_id, FINISHED, clears=True)
            results.flush()
    assert len(run.store.list(SEGMENTS)) == 4
    assert run.ended()[0] == {"a", "b"}


@pytest.mark.long
def test_on_a_store_with_faults_every_result_is_there_once_and_no_checkpoint_is_left(
    s3_store: Store, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "swiftbatch.jobs.storage.retries.STORE_BACKOFF", wait_random_exponential(multiplier=0.01, max=0.1)
    )
    run = Run.planned(s3_store.uri, MANIFEST, Retries(120)).made()
    checkpoints, results = CheckpointStore.of(run), Sealing(run, "w1", *NEVER)
    s3_proxy.chances = {"unavailable": 0.05, "refused": 0.03, "lost": 0.03, "cut": 0.03}
    job_ids = [f"job-{number}" for number in range(12)]
    for number, job_id in enumerate(job_ids):
        claim(checkpoints, job_id, "w1")
        results.add(job_id, FINISHED, clears=True)
        if number % 3 == 2:
            assert len(results.flush()) == 3
    assert s3_proxy.num_faults
    found = Run.open(s3_store.uri, Retries(120))
    assert found.ended()[0] == set(job_ids)
    assert [line for line in found.result_lines(job_ids) if line is not None] == [FINISHED] * 12
    assert len(s3_store.list(SEGMENTS)) == 4
    assert s3_store.list("checkpoints") == []


def test_a_store_that_fails_is_told_and_the_checkpoints_stay(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(Run, "write_segment", full)
    results = Sealing(run, "w1", *NEVER)
    results.add("a", FINISHED, clears=True)
    with pytest.raises(StoreError, match="the disk is full"):
        results.flush()
    assert run.store.list("checkpoints") == ["a", "b", "c"]
