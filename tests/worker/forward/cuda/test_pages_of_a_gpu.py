"""More jobs than a GPU's pages: the youngest leave and return."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.run import Run
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.kv_capacity import pages_of
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.session import session as worker_session
from swiftbatch.worker.session.session import WorkerSession
from swiftbatch.worker.session.work_messages import Assignment, JobOutcome, Orders
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.forward.cuda.cuda_parts import PAGE, cuda_target
from tests.worker.session.session_parts import claimed, digest, make_run, record, run_to_end, session, to_the_end

pytestmark = pytest.mark.long

LONGEST = 90  # positions
PROMPT = "fox and " * 11  # 60 tokens with `record`'s text: three pages with room for a step, soon four
JOBS = [record(f"{PROMPT}cat", 4), record(f"{PROMPT}dog", 6)]


@pytest.fixture(autouse=True)
def _no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_session, "step_costs_of", lambda target: free_rows)


@pytest.fixture
def alone(tmp_path: Path, one_layer_model: Path) -> dict[str, str]:
    return alone_on_a_cpu(tmp_path / "alone", one_layer_model)


def alone_on_a_cpu(folder: Path, model: Path) -> dict[str, str]:
    run = make_run(folder)
    run_to_end(run, model, *JOBS, engine="autoregressive")
    return {job.job_id: digest(run, job) for job in JOBS}


def worker_with(
    num_pages: int, run: Run, model: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[WorkerSession, KVArena]:
    def load(files: ModelFiles, *_: Any) -> TargetModel:
        return cuda_target(files, torch.float32, len(JOBS), LONGEST, linear="cublas", num_pages=num_pages)

    with monkeypatch.context() as patches:
        patches.setattr(TargetModel, "load", load)
        worker = session(run, model, engine=engine)
    arena = worker.engine.target.forwards.arena
    return worker, arena


def assigned(run: Run, jobs: list[JobRecord]) -> tuple[Assignment, ...]:
    return tuple(replace(claimed(run, job), seniority=JOBS.index(job)) for job in jobs)


@pytest.mark.parametrize("engine", ["token-recycling", pytest.param("autoregressive", marks=pytest.mark.slow)])
def test_jobs_that_outgrow_the_pages_have_the_tokens_of_plain_decoding(
    tmp_path: Path, one_layer_model: Path, alone: dict[str, str], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_jobs_that_outgrow_pages(tmp_path / "paged", one_layer_model, alone, engine, monkeypatch)


def check_jobs_that_outgrow_pages(
    folder: Path, model: Path, alone: dict[str, str], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(folder)
    worker, arena = worker_with(2 * pages_of(60, PAGE), run, model, engine, monkeypatch)
    waiting, given, evicted = list(JOBS), list(JOBS), list[JobOutcome]()
    while waiting:
        report = worker.work(Orders(assigned(run, given)), 1e-3)
        assert report.of("failed", "refused") == []
        evicted += report.of("evicted")
        ended = {job.job_id for job in report.of("finished")}
        waiting = [job for job in waiting if job.job_id not in ended]
        given = [job for job in waiting if job.job_id not in worker._running] if ended else []
        gc.collect()
        assert len({page for job in worker._running.values() for page in job.cache.pages}) + arena.num_free_pages == (
            arena.num_pages
        )
    assert {job.job_id: digest(run, job) for job in JOBS} == alone
    assert evicted
    assert JOBS[0].job_id not in {left.job_id for left in evicted}, "the eldest stays"
    assert (arena.num_free_pages, len(arena.leases.free)) == (arena.num_pages, len(JOBS))


def test_a_resumed_job_that_finds_no_page_waits_for_another_turn(
    tmp_path: Path, one_layer_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "paged")
    worker, arena = worker_with(pages_of(LONGEST, PAGE), run, one_layer_model, "autoregressive", monkeypatch)
    [first] = assigned(run, JOBS[:1])
    worker.work(Orders((first,)), 1e-3)
    worker.work(Orders(released=(JOBS[0].job_id,)), 1e-3)
    taken = arena.pool.take(arena.num_free_pages)
    [again] = assigned(run, JOBS[:1])
    report = worker.work(Orders((again,)), 1e-3)
    assert [left.job_id for left in report.of("evicted")] == [JOBS[0].job_id]
    assert report.of("failed", "refused") == []
    gc.collect()
    assert len(arena.leases.free) == len(JOBS)
    arena.pool.give_back(taken)
    assert to_the_end(worker, *assigned(run, JOBS[:1])).of("finished")
