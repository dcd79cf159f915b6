"""The state that the parts of a driver share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swiftbatch.jobs.run.run import Run
from swiftbatch.metrics.counters import DriverCounters
from swiftbatch.scheduler.display.display import Display
from swiftbatch.scheduler.driver.attempt_numbers import Attempts
from swiftbatch.scheduler.driver.job_queue import JobQueue
from swiftbatch.scheduler.driver.run_limits import Limits, Spending
from swiftbatch.scheduler.driver.throughput import monotonic
from swiftbatch.scheduler.driver.worker_fleet import Fleet


@dataclass(frozen=True)
class DriverContext:
    """A run that is driven: its jobs, its workers, and where it is told what happens."""

    run: Run
    queue: JobQueue
    attempts: Attempts
    fleet: Fleet
    display: Display
    counters: DriverCounters
    num_workers: int
    num_slots: int | None  # jobs that a worker runs at a time; None for as many as it has room for
    grace_seconds: float  # the time that a worker has to write its checkpoints before it ends
    limits: Limits
    spent: Spending
    most_positions: int | None = None  # that caches of a worker on a CPU may hold; None for most of what is free
    clock: Callable[[], float] = monotonic
