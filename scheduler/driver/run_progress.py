"""The state that the parts of a driver share, and the run's progress for heartbeat, display and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import WorkerStatus
from swiftbatch.metrics import exporter
from swiftbatch.metrics.counters import DriverCounters
from swiftbatch.metrics.exporter import METRICS_PATH, Labels, driver_families, registry_of, serve
from swiftbatch.scheduler.cluster.worker_actor import WorkerInfo
from swiftbatch.scheduler.display.display import Display
from swiftbatch.scheduler.display.events import MetricsServed
from swiftbatch.scheduler.driver.attempt_numbers import Attempts
from swiftbatch.scheduler.driver.job_queue import JobQueue
from swiftbatch.scheduler.driver.run_limits import Limits, Spending, monotonic
from swiftbatch.scheduler.driver.worker_fleet import Fleet, Worker

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family


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
    write_metrics: Callable[[], None] = lambda: None  # at each heartbeat


SHOWN = (  # worker counts in a heartbeat
    *("num_steps", "num_drafts", "num_accepted_tokens", "num_resumes"),
    *("num_tokens_by_draft", "num_read_tokens", "num_copied_tokens"),
)


class ProgressCounter:
    """Updates the driver's counters, and makes heartbeats from them."""

    def __init__(self, context: DriverContext) -> None:
        self._context = context
        self._num_rejects = len(context.run.rejects())
        self._worker_seconds = 0.0  # counted so far
        self._begun: dict[tuple[str, str], int] = {}  # tokens at first sight, by job and worker

    def take(self, now: float) -> dict[str, Any]:
        """Count everything `now` (`time.monotonic()` seconds); return fields of `Progress`."""
        queue, fleet, counters = self._context.queue, self._context.fleet, self._context.counters
        counters.jobs = queue.counts()
        states = [worker.state for worker in fleet.workers]
        counters.workers = {state: states.count(state) for state in ("starting", "ready", "draining")}
        device = "gpu" if fleet.num_gpus_per_worker() else "cpu"
        before, self._worker_seconds = self._worker_seconds, fleet.worker_seconds(now)
        seconds = self._worker_seconds - before
        counters.worker_seconds[device] = counters.worker_seconds.get(device, 0.0) + seconds
        self._context.spent.worker_seconds += seconds
        speed = fleet.speed.tokens_per_second(now)
        is_known = not self._most_replay() and speed > 0
        counters.eta_seconds = round(queue.num_tokens_left / speed, 1) if is_known else None
        totals = counters.totals(SHOWN)
        return {
            "jobs": counters.jobs,
            "max_tokens": {job.name: job.entry.max_tokens for job in queue.running()},
            "num_generated_tokens": queue.num_generated_tokens,
            "num_total_tokens": self._context.spent.num_tokens,
            "worker_seconds": round(self._context.spent.worker_seconds, 3),
            "num_tokens_left": queue.num_tokens_left,
            "tokens_per_second": round(speed, 2),
            "eta_seconds": counters.eta_seconds,
            "workers": tuple(self._status(worker, worker.info, now) for worker in fleet.workers if worker.info),
            "num_rejects": self._num_rejects,
            "num_starting_workers": states.count("starting"),
            "num_preemptions": counters.num_preemptions,
            "num_resumes": totals.num_resumes,
            "mean_acceptance_length": round(totals.mean_acceptance_length, 3) if totals.num_steps else None,
            "num_tokens_by_draft": totals.num_tokens_by_draft,
            "num_read_tokens": totals.num_read_tokens,
            "num_copied_tokens": totals.num_copied_tokens,
        }

    def _most_replay(self) -> bool:
        """Return whether most running jobs have drawn nothing since they were first seen on their workers."""
        before, running = self._begun, list(self._context.queue.running())
        keys = [(job.job_id, job.worker_id) for job in running]
        counts = [job.num_generated_tokens for job in running]
        self._begun = {key: before.get(key, count) for key, count in zip(keys, counts, strict=True)}
        num_still = sum(before.get(key) == count for key, count in zip(keys, counts, strict=True))
        return 2 * num_still > len(running)

    def _status(self, worker: Worker, info: WorkerInfo, now: float) -> WorkerStatus:
        counters = self._context.counters.by_worker.get(worker.id)
        return WorkerStatus(
            id=worker.id,
            host=info.host,
            pid=info.pid,
            node_id=info.node_id,
            numerics=info.numerics,
            jobs=tuple(job.name for _, job in sorted(self._context.queue.of(worker.id).running.items())),
            metrics_address=info.metrics_address,
            tokens_per_second=round(worker.speed.tokens_per_second(now), 2),
            last_checkpoint=None if counters is None else counters.last_checkpoint,
        )


@contextmanager
def served_metrics(context: DriverContext, labels: Labels, host: str, port: int) -> Iterator[Scrapes]:
    """Serve the driver's metrics and the discovery of all endpoints. Raises MetricsError."""
    targets = target_labels(context.run)
    pages = {
        exporter.DISCOVERY_PATH: lambda own_address: exporter.discovery_document(
            [own_address, *_addresses(context.fleet)], targets
        )
    }
    scrapes = Scrapes()

    def scraped() -> Iterator[Family]:
        scrapes.note()
        return driver_families(context.counters, labels)

    address, stop = serve(registry_of(scraped), port, pages, host)
    context.display.note(MetricsServed(address, address.removesuffix(METRICS_PATH) + exporter.DISCOVERY_PATH))
    try:
        yield scrapes
    finally:
        stop()


def target_labels(run: Run) -> dict[str, str]:
    """Return the labels of a run's metrics that Prometheus adds, or a textfile has."""
    store, team = run.store, run.manifest.team
    labels = {"run": store.uri if store.is_local else store.shown_uri}  # an object store's URI may hold credentials
    return labels if team is None else labels | {"team": team}


LONGEST_STAY_SECONDS = 120.0
POLL_SECONDS = 0.1


class Scrapes:
    """The scrapes of a driver, which waits for a last one: nobody else tells how its run ended."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._last: float | None = None
        self._longest = 0.0  # seconds between two scrapes

    def note(self) -> None:
        now = self._clock()
        self._longest = max(self._longest, now - (now if self._last is None else self._last))
        self._last = now

    def wait_for_last(self, is_stopping: Callable[[], bool], pause: Callable[[float], None] = time.sleep) -> None:
        """Wait for a scrape from now on, for at most twice their longest distance, or until `is_stopping`."""
        before, end = self._last, self._clock() + min(2 * self._longest, LONGEST_STAY_SECONDS)
        while self._last == before and self._clock() < end and not is_stopping():
            pause(POLL_SECONDS)


def _addresses(fleet: Fleet) -> list[str]:
    infos = [worker.info for worker in list(fleet.workers)]  # a copy, since the driver's loop changes the list
    return [info.metrics_address for info in infos if info is not None and info.metrics_address is not None]
