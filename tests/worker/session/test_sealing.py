"""When the results of a worker are written, and that nothing of a job goes before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.run.result_segments import SEGMENTS, SealedResult
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.store import StoreError
from swiftbatch.worker.session import sealing
from swiftbatch.worker.session.sealing import Sealing, SealingRule
from tests.jobs.run.run_parts import FINISHED, MANIFEST

NEVER = SealingRule(seconds=1e9, num_tokens=10**9)


def result(job_id: str) -> SealedResult:
    return SealedResult.of(job_id, FINISHED)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run.create_or_open(str(tmp_path / "run"), MANIFEST)
    checkpoints = CheckpointStore.of(run)
    for job_id in "abc":
        checkpoints.write_tokens(job_id, checkpoints.claim(job_id, "w1"), np.arange(5, dtype=np.uint32))
    return run


def test_a_job_finishes_and_loses_its_checkpoints_when_its_segment_is_there_and_not_before(run: Run) -> None:
    results = Sealing(run, "w1", NEVER)
    results.add(result("a"), is_kept=False)
    results.add(result("b"), is_kept=True)
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
    rule = SealingRule(0.0 if due == "old" else 1e9, FINISHED["response"]["body"]["usage"]["completion_tokens"])
    monkeypatch.setattr(sealing, "MOST_RESULTS", 2 if due == "many" else 1000)
    monkeypatch.setattr(sealing, "MOST_BYTES", 10 if due == "large" else 2**20)
    results = Sealing(run, "w1", rule if due in ("old", "long") else NEVER)
    for job_id in "ab":
        results.add(result(job_id), is_kept=False)
    results.seal_due()
    results.add(result("c"), is_kept=False)
    monkeypatch.setattr(Sealing, "seal", lambda _: None)  # what is under way alone
    assert [progress.job_id for progress in results.flush()] == ["a", "b"]


def test_two_lives_of_a_worker_never_give_segments_the_same_name(run: Run) -> None:
    for _ in range(2):
        results = Sealing(run, "w1", NEVER)
        for job_id in "ab":
            results.add(result(job_id), is_kept=False)
            results.flush()
    assert len(run.store.list(SEGMENTS)) == 4
    assert run.ended()[0] == {"a", "b"}


def test_a_store_that_fails_is_told_and_the_checkpoints_stay(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(Run, "write_segment", full)
    results = Sealing(run, "w1", NEVER)
    results.add(result("a"), is_kept=False)
    with pytest.raises(StoreError, match="the disk is full"):
        results.flush()
    assert run.store.list("checkpoints") == ["a", "b", "c"]
