"""A driver with workers in its own process that do nothing but write results, and what it costs.

The driver, its fleet and the run folder are the real ones. Left out are Ray, and the wait for the disk.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jobs.job import JobRecord
from jobs.run.results import success_line
from jobs.run.run import Run
from scheduler.cluster import remote
from scheduler.cluster.actors import WorkerInfo
from scheduler.driver.driver import Driver
from tests.scheduler.driver.driver_parts import RecordingDisplay, make_driver, make_run
from worker.session.work import JobProgress, Orders, WorkReport

NUM_WORKERS, NUM_SLOTS = 4, 4
WINDOW = 50  # slices: the quietest so many tell what a job costs, the others what else the machine does


@dataclass(frozen=True, eq=False)
class Answer:
    """Stands for a reference to an answer: it is there at once."""

    value: object


@dataclass
class Method:
    """Called as a method of a Ray actor is."""

    function: Callable[..., object]

    def remote(self, *args: object) -> Answer:
        return Answer(self.function(*args))


@dataclass
class Stopwatch:
    """Wall and processor seconds spent inside it."""

    wall: float = 0.0
    processor: float = 0.0

    def __enter__(self) -> None:
        self.wall -= time.perf_counter()
        self.processor -= time.process_time()

    def __exit__(self, *_: object) -> None:
        self.wall += time.perf_counter()
        self.processor += time.process_time()


@dataclass
class Dispatched:
    """A run that goes through the driver, and what the driver itself needs, workers and test left out."""

    run: Run
    num_jobs: int
    num_handed_out: int = 0
    total: Stopwatch = field(default_factory=Stopwatch)
    others: Stopwatch = field(default_factory=Stopwatch)
    course: list[tuple[int, float]] = field(default_factory=list)  # at each slice: jobs handed out, processor seconds
    status_seconds: float = 0.0
    status: dict[str, Any] = field(default_factory=dict)

    def ms_per_job(self) -> float:
        """Processor time in the quietest stretch of the first half, while at least half of the jobs wait."""
        half = self.course[: len(self.course) // 2]
        return 1000 * min((end - start) / (m - n) for (n, start), (m, end) in zip(half, half[WINDOW:], strict=False))

    def figures(self) -> str:
        others, per_job = self.others, 1000 / self.num_jobs
        return (
            f"{self.num_jobs:,} jobs: the driver needs {self.ms_per_job():.3f} ms of processor per job at best, "
            f"{(self.total.processor - others.processor) * per_job:.3f} on average, "
            f"{(self.total.wall - others.wall) * per_job:.3f} in all; status answers in {self.status_seconds:.2f} s"
        )

    def start_slice(self) -> None:
        """A worker is about to run."""
        self.course.append((self.num_handed_out, time.process_time() - self.others.processor))

    def count(self) -> None:
        """One more job has reached a worker."""
        self.num_handed_out += 1
        if self.num_handed_out == self.num_jobs // 2:
            self.status_seconds, self.status = ask_status(self.run)


class NoOpWorker:
    """Finishes every job in the slice in which it gets it."""

    def __init__(self, dispatched: Dispatched) -> None:
        self._dispatched = dispatched
        info = WorkerInfo("here", os.getpid(), None, node_id="node", numerics="", num_free_positions=1_000_000)
        self.start, self.work = Method(lambda: info), Method(self._work)

    def _work(self, orders: Orders, seconds: float) -> WorkReport:
        self._dispatched.start_slice()
        with self._dispatched.others:
            finished = tuple(self._finish(assignment.record) for assignment in orders.assignments)
            return WorkReport(finished=finished, num_generated_tokens=sum(job.num_generated_tokens for job in finished))

    def _finish(self, record: JobRecord) -> JobProgress:
        self._dispatched.count()
        ids = np.zeros(record.job.sampling.max_tokens, np.uint32)
        line = success_line(
            record,
            "run",
            "text",
            "length",
            model="none",
            system_fingerprint=self._dispatched.run.manifest.fingerprint,
            token_ids=ids,
            metrics={"seconds": 1.5},
        )
        self._dispatched.run.write_result(record.job_id, line)
        return JobProgress(record.job_id, len(ids))


def ask_status(run: Run) -> tuple[float, dict[str, Any]]:
    """Processor seconds that `swiftbatch status` takes, start of the interpreter included, and its answer."""
    command = [sys.executable, "-m", "scheduler.cli", "status", run.store.uri, "--json"]
    started = _processor_seconds_of_children()
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return _processor_seconds_of_children() - started, json.loads(text)


def _processor_seconds_of_children() -> float:
    """Of those that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def with_driver(folder: Path, num_jobs: int, patch: pytest.MonkeyPatch) -> tuple[Dispatched, Driver]:
    """A run and the driver for it, which has read the run folder already."""
    dispatched = Dispatched(make_run(folder, {f"job-{i}": 8 + i % 50 for i in range(num_jobs)}), num_jobs)
    patch.setattr(remote, "create_actor", lambda *_, **__: NoOpWorker(dispatched))
    patch.setattr(remote, "wait", lambda calls, seconds: calls)
    patch.setattr(remote, "answer", lambda call: call.value)
    patch.setattr(remote, "kill", lambda actor: None)
    patch.setattr(os, "fsync", lambda descriptor: None)  # the disk's time, not the driver's
    cluster: Any = SimpleNamespace(
        is_embedded=True, num_cpus_per_worker=lambda: 1, num_gpus_per_worker=lambda device: 0, watch=None
    )
    driver = make_driver(dispatched.run, cluster, RecordingDisplay(), workers=NUM_WORKERS, slots=NUM_SLOTS)
    return dispatched, driver


def dispatch(folder: Path, num_jobs: int, patch: pytest.MonkeyPatch) -> Dispatched:
    dispatched, driver = with_driver(folder, num_jobs, patch)
    with dispatched.total:
        assert driver.run() == "finished"
    print(f"\n{dispatched.figures()}")
    return dispatched
