from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftbatch.jobs.job import Job, JobRecord
from swiftbatch.jobs.run.output_line import tokens_sha256
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import Progress, RunManifest
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.metrics.counters import DriverCounters
from swiftbatch.scheduler.cluster.ray_cluster import Cluster, connect
from swiftbatch.scheduler.cluster.worker_actor import WorkerSpec
from swiftbatch.scheduler.display.events import Event
from swiftbatch.scheduler.driver.attempt_numbers import Attempts
from swiftbatch.scheduler.driver.driver import Driver
from swiftbatch.scheduler.driver.job_queue import JobQueue
from swiftbatch.scheduler.driver.queue_loading import load_queue, put_logs_in_place
from swiftbatch.scheduler.driver.run_lease import RunLease
from swiftbatch.scheduler.driver.run_limits import Limits, Spending
from swiftbatch.scheduler.driver.run_progress import DriverContext
from swiftbatch.scheduler.driver.worker_fleet import Fleet
from swiftbatch.worker.config import EngineConfig
from tests import ROOT
from tests.worker.session.counting_session import TOKENS_PER_SLICE

NO_LIMITS = Limits()
SEED = 7
COUNTING = "tests.worker.session.counting_session"  # a session that counts instead of decoding


class RecordingDisplay:
    """Records what the driver shows, and may act on it."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.updates: list[Progress] = []
        self.on_update: Callable[[Progress], None] = lambda progress: None

    def note(self, event: Event) -> None:
        self.notes += str(event).splitlines()

    def update(self, progress: Progress) -> None:
        self.updates.append(progress)
        self.on_update(progress)


@contextmanager
def counting_cluster() -> Iterator[Cluster]:
    """Start an embedded Ray whose workers find the counting session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with connect(None, num_workers=2) as cluster:
            yield cluster


def make_run(folder: Path, jobs: dict[str, int], seed: int = SEED, prompts: Mapping[str, int] = {}) -> Run:
    """`jobs` is custom_id: max_tokens; `prompts` are the longer ones."""
    manifest = RunManifest(
        run_id="run",
        created=time.time(),
        model="counting",
        model_fingerprint="f",
        text_fingerprint="t",
        model_files={},
        engine="autoregressive",
        dtype="float32",
        device="cpu",
        num_threads=1,
        seed=seed,
        clock="2026-11-28T10:00:00+01:00",
        versions={},
        exactness="not probed",
        cpu_capability="",
    )
    run = Run.planned(str(folder), manifest).made()
    records = []
    for line_number, (custom_id, max_tokens) in enumerate(jobs.items(), start=1):
        sampling = SamplingParams(max_tokens=max_tokens, seed=seed)
        job = Job(custom_id=custom_id, url="/v1/completions", prompt="count", sampling=sampling)
        records.append(JobRecord(job.job_id("f"), job, line_number, prompts.get(custom_id, 1)))
    run.add_jobs(records)
    run.write_rejects([])  # written after the jobs, as `submit` does: without it the submission counts as cut short
    return run


def make_context(
    run: Run,
    fleet: Fleet,
    queue: JobQueue | None = None,
    display: RecordingDisplay | None = None,
    counters: DriverCounters | None = None,
    *,
    workers: int = 1,
    slots: int = 1,
    grace: float = 20.0,
    limits: Limits = NO_LIMITS,
    spent: Spending | None = None,
    tries: Attempts | None = None,
) -> DriverContext:
    return DriverContext(
        run,
        queue or JobQueue(max_attempts=5),
        tries or Attempts(run.store, 1, {}),
        fleet,
        display or RecordingDisplay(),
        counters or DriverCounters(),
        num_workers=workers,
        num_slots=slots,
        grace_seconds=grace,
        limits=limits,
        spent=spent or Spending(),
    )


def last_beat_of_a_stopped(driver: Driver, run: Run, display: RecordingDisplay) -> Progress:
    """Stop the driver after a hundred tokens."""
    display.on_update = lambda progress: driver.request_stop() if progress.num_generated_tokens > 100 else None
    assert driver.run() == "interrupted"
    progress = run.progress()
    assert progress.state == "interrupted"
    return progress


def make_driver(
    run: Run,
    cluster: Cluster,
    display: RecordingDisplay,
    *,
    workers: int = 2,
    slots: int = 1,
    attempts: int = 5,
    session: str = "CountingSession",
    config: EngineConfig | None = None,
    counters: DriverCounters | None = None,
    grace: float = 20.0,
    may_take_over: bool = False,
    worker_timeout: float = 120.0,
    limits: Limits = NO_LIMITS,
) -> Driver:
    """`session` is a class of the counting sessions' module, or "module:class"."""
    factory = session if ":" in session else f"{COUNTING}:{session}"
    logs = f"{run.store.uri}/logs"
    spec = WorkerSpec(config or EngineConfig(), run.store.uri, session_factory=factory, log_folder=logs)
    hold, fleet = RunLease(run, may_take_over), Fleet(spec, cluster, worker_timeout)
    put_logs_in_place(run)
    tries = Attempts.read(run.store, hold.epoch.number)
    queue = load_queue(run, attempts, tries)
    spent = Spending.so_far(hold.before, queue.num_generated_tokens)
    shared: dict[str, Any] = {"workers": workers, "slots": slots, "grace": grace, "limits": limits}
    context = make_context(run, fleet, queue, display, counters, **shared, spent=spent, tries=tries)
    return Driver(context, hold)


def job_id(run: Run, custom_id: str) -> str:
    return next(record.job_id for record in run.jobs() if record.job.custom_id == custom_id)


def token_hash(run: Run, custom_id: str) -> str:
    return str(run.result(job_id(run, custom_id))["response"]["body"]["choices"][0]["token_ids_sha256"])


def undisturbed_hash(num_tokens: int) -> str:
    positions = np.arange(num_tokens, dtype=np.uint32)
    return tokens_sha256(SEED + positions + positions % TOKENS_PER_SLICE)


def assert_undisturbed(run: Run, jobs: Mapping[str, int]) -> None:
    assert {name: token_hash(run, name) for name in jobs} == {
        name: undisturbed_hash(max_tokens) for name, max_tokens in jobs.items()
    }


def result_metrics(run: Run, custom_id: str) -> dict[str, Any]:
    return dict(run.result(job_id(run, custom_id))["response"]["body"]["metrics"])
