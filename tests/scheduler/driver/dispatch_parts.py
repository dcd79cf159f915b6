"""A driver with in-process workers that only write results.

Driver, fleet and run folder are real; Ray and disk waits are left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.output_line import line_id, success_line
from swiftbatch.jobs.run.result_files import ResultSegment
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.cli import main
from swiftbatch.scheduler.cluster import ray_actors
from swiftbatch.scheduler.cluster.worker_actor import WorkerInfo, WorkerSpec
from swiftbatch.scheduler.driver.driver import Driver
from swiftbatch.scheduler.runs import launch
from swiftbatch.worker.session.work_messages import JobOutcome, Orders, WorkReport
from tests.scheduler.driver.driver_parts import RecordingDisplay, make_driver, make_run
from tests.work_counts import Work, counted_calls

NUM_WORKERS, NUM_SLOTS = 4, 4
WINDOW = 50  # slices: the cheapest stretch without a heartbeat shows a job's cost


@dataclass(frozen=True, eq=False)
class Answer:
    value: object


@dataclass
class Method:
    function: Callable[..., object]

    def remote(self, *args: object) -> Answer:
        return Answer(self.function(*args))


@dataclass
class Dispatched:
    run: Run
    num_jobs: int
    num_handed_out: int = 0
    total: Work = field(default_factory=Work)
    others: Work = field(default_factory=Work)
    course: list[tuple[int, int]] = field(default_factory=list)  # at each slice: jobs handed out, calls of the driver
    num_status_calls: int = 0
    status: dict[str, Any] = field(default_factory=dict)

    def calls_per_job(self) -> float:
        """Return the cheapest stretch while at least half of the jobs wait."""
        half = self.course[: len(self.course) // 2]
        return min((end - start) / (m - n) for (n, start), (m, end) in zip(half, half[WINDOW:], strict=False))

    def figures(self) -> str:
        average = (self.total.num_calls - self.others.num_calls) / self.num_jobs
        return (
            f"{self.num_jobs:,} jobs: the driver makes {self.calls_per_job():.0f} calls per job at best, "
            f"{average:.0f} on average; status answers after {self.num_status_calls:,}"
        )

    @contextmanager
    def slice(self) -> Iterator[None]:
        before = self.total.num_calls
        self.course.append((self.num_handed_out, before - self.others.num_calls))
        yield
        self.others.num_calls += self.total.num_calls - before

    def count(self) -> None:
        self.num_handed_out += 1
        if self.num_handed_out == self.num_jobs // 2:
            self.num_status_calls, self.status = ask_status(self.run)


class NoOpWorker:
    def __init__(self, dispatched: Dispatched) -> None:
        self._dispatched = dispatched
        self.info = WorkerInfo("here", os.getpid(), None, node_id="node", numerics="", num_free_positions=1_000_000)
        self.start, self.work = Method(lambda failed_gpus: self.info), Method(self.finish_all)

    def finish_all(self, orders: Orders, seconds: float) -> WorkReport:
        with self._dispatched.slice():
            results = ResultSegment((each.job_id, self._line(each.record)) for each in orders.assignments)
            if results.index:
                run = Run.open(self._dispatched.run.store.uri)  # a new object, so that the driver's caches stay unused
                run.write_segment(orders.assignments[0].job_id, results)
            jobs = [(assignment.job_id, assignment.record.job.sampling.max_tokens) for assignment in orders.assignments]
            finished = [JobOutcome("finished", *job) for job in jobs]
            return WorkReport(finished, num_generated_tokens=sum(job.num_generated_tokens for job in finished))

    def _line(self, record: JobRecord) -> dict[str, Any]:
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
        return {"id": line_id(record.job_id)} | line


@contextmanager
def idle_workers() -> Iterator[None]:
    """Make commands start no Ray, and workers that only write results."""
    cluster = SimpleNamespace(
        is_embedded=True, num_cpus_per_worker=lambda: 1, gives_gpus=lambda device: False, watch=None
    )

    def create_actor(_: object, spec: WorkerSpec, *__: object, **___: object) -> NoOpWorker:
        return NoOpWorker(Dispatched(Run.open(spec.run_uri), 0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "connect", lambda address, num_workers: nullcontext(cluster))
        patch.setattr(ray_actors, "create_actor", create_actor)
        patch.setattr(ray_actors, "wait", lambda calls, seconds: calls)
        patch.setattr(ray_actors, "answer", lambda call: call.value)
        patch.setattr(ray_actors, "kill", lambda actor: None)
        yield


def ask_status(run: Run) -> tuple[int, dict[str, Any]]:
    """Return the calls of `swiftbatch status` and its answer."""
    with counted_calls() as work:
        result = CliRunner().invoke(main, ["status", run.store.uri, "--json"])
    return work.num_calls, json.loads(result.stdout)


def with_driver(folder: Path, num_jobs: int, patch: pytest.MonkeyPatch) -> tuple[Dispatched, Driver]:
    """Yield a run and its loaded driver."""
    dispatched = Dispatched(make_run(folder, {f"job-{i}": 8 + i % 50 for i in range(num_jobs)}), num_jobs)
    patch.setattr(ray_actors, "create_actor", lambda *_, **__: NoOpWorker(dispatched))
    patch.setattr(ray_actors, "wait", lambda calls, seconds: calls)
    patch.setattr(ray_actors, "answer", lambda call: call.value)
    patch.setattr(ray_actors, "kill", lambda actor: None)
    patch.setattr(os, "fsync", lambda descriptor: None)  # the disk's time is not the driver's
    cluster: Any = SimpleNamespace(
        is_embedded=True, num_cpus_per_worker=lambda: 1, gives_gpus=lambda device: False, watch=None
    )
    driver = make_driver(dispatched.run, cluster, RecordingDisplay(), workers=NUM_WORKERS, slots=NUM_SLOTS)
    return dispatched, driver


def dispatch(folder: Path, num_jobs: int, patch: pytest.MonkeyPatch) -> Dispatched:
    dispatched, driver = with_driver(folder, num_jobs, patch)
    with counted_calls(dispatched.total):
        assert driver.run() == "finished"
    print(f"\n{dispatched.figures()}")
    return dispatched
