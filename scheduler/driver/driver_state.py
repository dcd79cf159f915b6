"""The state shared by the parts of a driver."""

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
    """A driven run with its jobs, workers and display."""

    run: Run
    queue: JobQueue
    attempts: Attempts
    fleet: Fleet
    display: Display
    counters: DriverCounters
    num_workers: int
    num_slots: int | None  # jobs at a time per worker; None: as many as fit
    grace_seconds: float  # a worker's time to write checkpoints before it ends
    limits: Limits
    spent: Spending
    most_positions: int | None = None  # for a CPU worker's caches; None: most of the free memory
    clock: Callable[[], float] = monotonic
