"""Jobs of one prompt on a worker read it once, whatever is lost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.run import Run
from swiftbatch.worker.session.session import WorkerSession
from swiftbatch.worker.session.work_messages import Assignment, Orders
from tests.worker.session.session_parts import (
    claimed,
    digest,
    have_caches_loaded,
    make_run,
    record,
    run_to_end,
    session,
    to_the_end,
)

pytestmark = pytest.mark.long

BOOK = "the quick brown fox jumps over the lazy dog, and then " * 30
NUM_TOKENS = 2


def jobs_of(num_jobs: int, tail: str = "", num_tokens: int = NUM_TOKENS) -> list[JobRecord]:
    return [
        record(f"j{i}", num_tokens, {"seed": i}, prompt=BOOK + (f"{tail}{i}" if tail else "")) for i in range(num_jobs)
    ]


def num_prompt_tokens(worker: WorkerSession, job: JobRecord) -> int:
    return len(worker._codec.prompt_of(job.job).token_ids)


def assigned(run: Run, worker: WorkerSession, job: JobRecord) -> Assignment:
    """Assign as a driver that knows of the shared prompt."""
    shared = num_prompt_tokens(worker, job) // 64 * 64
    return replace(claimed(run, job), num_shared_tokens=shared)


def in_turn(run: Run, worker: WorkerSession, jobs: Sequence[JobRecord], num_slots: int) -> None:
    for first in range(0, len(jobs), num_slots):
        to_the_end(worker, *(assigned(run, worker, job) for job in jobs[first : first + num_slots]))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("num_jobs", "num_slots"), [(20, 1), (200, 8)])
def test_jobs_of_one_prompt_read_it_once(
    run: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, num_jobs: int, num_slots: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the disk's time
    worker, jobs = session(run, tiny_model, engine="autoregressive", checkpoint="tokens"), jobs_of(num_jobs)
    in_turn(run, worker, jobs, num_slots)
    length, counters = num_prompt_tokens(worker, jobs[0]), worker.engine.counters
    assert counters.num_read_tokens == length - 1  # the last one is the first step's root
    assert counters.num_copied_tokens == (num_jobs - 1) * (length - 1)
    assert counters.num_prompt_tokens == num_jobs * length


def test_jobs_with_ends_of_their_own_read_these_alone(run: Run, tiny_model: Path) -> None:
    worker, jobs = session(run, tiny_model, engine="autoregressive", checkpoint="tokens"), jobs_of(12, "number ")
    in_turn(run, worker, jobs, 3)
    length = num_prompt_tokens(worker, record("book", prompt=BOOK))
    own = sum(num_prompt_tokens(worker, job) - length + 1 for job in jobs)
    assert worker.engine.counters.num_read_tokens <= length + own


def alone(folder: Path, tiny_model: Path, jobs: Sequence[JobRecord]) -> list[str]:
    run, found = make_run(folder), []
    for job in jobs:
        run_to_end(run, tiny_model, job, engine="autoregressive")
        found.append(digest(run, job))
    return found


@pytest.mark.parametrize("loads", [True, False])
def test_workers_that_are_lost_while_a_shared_prompt_is_read_cost_no_bit(
    run: Run, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, loads: bool
) -> None:
    monkeypatch.setattr("swiftbatch.worker.engine.prefill.PREFILL_SECONDS", 1e-4)
    have_caches_loaded(monkeypatch, loads)
    jobs = jobs_of(4, "number ")
    first = session(run, tiny_model, checkpoint="state")
    report = first.work(Orders(tuple(assigned(run, first, job) for job in jobs)), 0.0)
    while first.engine.counters.num_read_tokens < 200:
        report = first.work(Orders(), 1e-4)
    assert first.engine.counters.num_copied_tokens == 0
    assert [outcome.num_generated_tokens for outcome in report.of("running")] == [0] * len(jobs)
    num_read = first.engine.counters.num_read_tokens
    first.drain(30.0)
    second = session(run, tiny_model)
    to_the_end(second, *(assigned(run, second, job) for job in reversed(jobs)))
    assert [digest(run, job) for job in jobs] == alone(tmp_path / "alone", tiny_model, jobs)
    length = num_prompt_tokens(second, jobs[0])
    least = length - 1 - num_read if loads else length - 1
    assert least <= second.engine.counters.num_read_tokens <= least + 3 * 64


def test_what_was_copied_is_in_no_checkpoint_until_there_is_as_much_of_the_job_s_own(
    run: Run, tiny_model: Path
) -> None:
    worker, [reader, other] = session(run, tiny_model, checkpoint="state", checkpoint_tokens=64), jobs_of(2, "", 300)
    worker.work(Orders((assigned(run, worker, reader), assigned(run, worker, other))), 0.0)
    while worker.engine.counters.num_copied_tokens == 0:
        worker.work(Orders(), 1e-4)
    worker._checkpointing._writer.flush(30.0)
    files = {job.job_id: run.store.list(f"checkpoints/{job.job_id}/0001") for job in (reader, other)}
    assert any("kv" in name for name in files[reader.job_id])
    assert not any("kv" in name for name in files[other.job_id])
