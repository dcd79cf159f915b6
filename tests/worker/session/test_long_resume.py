"""A job at position 60,000: both kinds of resume against an undisturbed worker."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from swiftbatch.jobs.run.run import Run
from swiftbatch.worker.config import EngineConfig
from tests.worker.session.session_parts import (
    WorkerWithPrompts,
    body,
    claimed,
    digest,
    make_run,
    record,
    to_the_end,
    until,
)

NUM_TOKENS = 60_000
NUM_MORE = 2000
KEPT = {"kv": [], "replay": ["*.arrow", "manifest.json"]}  # what each kind of resume lacks


def worker_at(folder: Path) -> WorkerWithPrompts:
    return WorkerWithPrompts(EngineConfig(num_threads=2), str(folder), "w0")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_job_at_position_60_000_is_resumed_with_the_same_tokens_and_most_of_its_cache(tmp_path: Path) -> None:
    run, job = make_run(tmp_path / "run"), record("fox", NUM_TOKENS + NUM_MORE)
    worker = worker_at(tmp_path / "run")
    until(worker, job, NUM_TOKENS, claimed(run, job))
    time.sleep(5)  # background writes finish, as a moment before a kill
    for kind, missing in KEPT.items():
        shutil.copytree(tmp_path / "run", tmp_path / kind, ignore=shutil.ignore_patterns(*missing))
    to_the_end(worker)
    for kind in KEPT:
        resumed = Run.open(str(tmp_path / kind))
        to_the_end(worker_at(tmp_path / kind), claimed(resumed, job))
        assert digest(resumed, job) == digest(run, job)
        resume = body(resumed, job)["metrics"]["attempts"][1]["resume"]
        print(f"{kind}: {resume}")
        assert resume["kind"] == kind
        assert resume["num_recovered_tokens"] > NUM_TOKENS - 2000
        assert (resume["num_loaded_positions"] > NUM_TOKENS - 2000) == (kind == "kv")
