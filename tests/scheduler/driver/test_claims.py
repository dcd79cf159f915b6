"""Attempts are claimed beside the loop: a slow store holds up nobody but the worker that waits for it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.storage.store import StoreError
from swiftbatch.scheduler.driver.dispatch import Claims
from tests.scheduler.driver.dispatch_parts import with_driver

SECONDS = 60  # until a test gives up


class SlowCheckpoints:
    """Numbers attempts as an object store may: two at once get the same number."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.num_attempts = 0

    def claim(self, job_id: str, worker_id: str, numerics: str) -> int:
        attempt = self.num_attempts + 1
        assert self.may_go_on.wait(SECONDS)
        self.num_attempts = attempt
        return attempt


def made_for(claims: Claims, worker_id: str) -> dict[str, int]:
    while claims.under_way(worker_id):
        claims.wait()
        if made := claims.made(worker_id):
            return made
    return {}


def test_two_claims_of_one_job_never_get_one_number() -> None:
    checkpoints: Any = SlowCheckpoints()
    claims = Claims(checkpoints)
    claims.ask("job", "lost", "")
    claims.ask("job", "next", "")
    claims.wait()
    assert claims.made("next") == {}
    assert list(claims.under_way("next")) == ["job"]
    checkpoints.may_go_on.set()
    assert made_for(claims, "next") == {"job": 2}
    assert made_for(claims, "lost") == {"job": 1}
    claims.stop()


def test_a_store_that_fails_a_claim_stops_the_loop() -> None:
    class Broken:
        def claim(self, job_id: str, worker_id: str, numerics: str) -> int:
            raise StoreError("cannot write")

    checkpoints: Any = Broken()
    claims = Claims(checkpoints)
    claims.ask("job", "w1", "")
    with pytest.raises(StoreError, match="cannot write"):
        made_for(claims, "w1")
    claims.stop()


def test_while_one_claim_takes_long_other_workers_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_jobs, others_are_done = 6, threading.Event()
    dispatched, driver = with_driver(tmp_path / "run", num_jobs, monkeypatch)
    count, claim, slow = dispatched.count, CheckpointStore.claim, dispatched.run.jobs()[0].job_id

    def counted() -> None:
        count()
        if dispatched.num_handed_out == num_jobs - 1:
            others_are_done.set()

    def slowly(checkpoints: CheckpointStore, job_id: str, worker_id: str, numerics: str = "") -> int:
        assert job_id != slow or others_are_done.wait(SECONDS)
        return claim(checkpoints, job_id, worker_id, numerics)

    monkeypatch.setattr(dispatched, "count", counted)
    monkeypatch.setattr(CheckpointStore, "claim", slowly)
    assert driver.run() == "finished"
    assert dispatched.num_handed_out == num_jobs
