"""More jobs than memory: the youngest leave and return."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.run import Run
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.kv import kv_capacity
from swiftbatch.worker.session.session import WorkerSession
from swiftbatch.worker.session.work_messages import Assignment, JobOutcome, Orders
from tests.worker.session.session_parts import claimed, digest, make_run, record, session, to_the_end

pytestmark = pytest.mark.long

NUM_JOBS, NUM_FITTING, NUM_GIVEN = 24, 6, 10
SHORTEST, LONGEST = 14, 18  # tokens; more jobs than fit exceed the memory before one ends
JOBS = [record(f"job {number}", SHORTEST + number % (LONGEST - SHORTEST + 1)) for number in range(NUM_JOBS)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, str]:
    run = make_run(tmp_path_factory.mktemp("alone"))
    worker = session(run, tiny_model, engine="autoregressive")
    for job in JOBS:
        to_the_end(worker, claimed(run, job))
    return {job.job_id: digest(run, job) for job in JOBS}


class Overcommitted:
    """Gives a worker too many jobs, and recalls some at random."""

    def __init__(self, run: Run, worker: WorkerSession, num_pages: int) -> None:
        self._run, self._worker, self._num_pages = run, worker, num_pages
        self._rng = random.Random(0)
        self._waiting = list(JOBS)
        self._running: dict[str, JobRecord] = {}
        self._seniorities = {job.job_id: number for number, job in enumerate(JOBS)}
        self.num_evicted = self.num_released = 0

    def run_all(self) -> None:
        while self._waiting or self._running:
            orders = Orders(self._taken(), released=self._thrown_out(), num_pages=self._num_pages)
            report = self._worker.work(orders, 1e-3)
            assert not report.of("failed", "refused")
            for progress in report.of("finished"):
                del self._running[progress.job_id]
            stayed = [self._seniorities[progress.job_id] for progress in report.of("running")]
            assert all(self._seniorities[left.job_id] > min(stayed, default=-1) for left in report.of("evicted"))
            self.num_evicted += self._put_back(report.of("evicted"))
            self.num_released += self._put_back(report.of("released"))

    def _taken(self) -> tuple[Assignment, ...]:
        num_free = NUM_GIVEN - len(self._running) if len(self._running) < NUM_FITTING else 0
        jobs, self._waiting = self._waiting[:num_free], self._waiting[num_free:]
        self._running.update({job.job_id: job for job in jobs})
        return tuple(replace(claimed(self._run, job), seniority=self._seniorities[job.job_id]) for job in jobs)

    def _thrown_out(self) -> tuple[str, ...]:
        return tuple(job_id for job_id in sorted(self._running) if self._rng.random() < 0.01)

    def _put_back(self, jobs: list[JobOutcome]) -> int:
        self._waiting += [self._running.pop(progress.job_id) for progress in jobs]
        self._rng.shuffle(self._waiting)
        return len(jobs)


@pytest.mark.sample(3)
@pytest.mark.parametrize("engine", ENGINES)
def test_jobs_that_outgrow_the_memory_have_the_tokens_of_plain_decoding(
    tmp_path: Path, tiny_model: Path, alone: dict[str, str], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the disk's time
    monkeypatch.setattr(kv_capacity, "PAGE", 2)
    monkeypatch.setattr(kv_capacity, "ROOM_BEHIND", 0)
    run = make_run(tmp_path)
    num_pages = NUM_FITTING * kv_capacity.pages_of(LONGEST + 10)
    jobs = Overcommitted(run, session(run, tiny_model, engine=engine), num_pages)
    jobs.run_all()
    assert {job.job_id: digest(run, job) for job in JOBS} == alone
    assert jobs.num_evicted > 0
