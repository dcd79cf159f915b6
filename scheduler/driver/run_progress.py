"""The state that the parts of a driver share, and the run's progress for heartbeat, display and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
from swiftbatch.worker.config import EngineConfig


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


SHOWN = (  # worker counts in a heartbeat
    *("num_steps", "num_drafts", "num_accepted_tokens", "num_resumes"),
    *("num_tokens_by_draft", "num_read_tokens", "num_copied_tokens"),
)


class ProgressCounter:
    """Updates the driver's counters, and makes heartbeats from them."""

    def __init__(self, context: DriverContext) -> None:
        self._context = context
        self._num_rejects = len(context.run.rejects())
        self._last: float | None = None
        self._begun: dict[tuple[str, str], int] = {}  # tokens at first sight, by job and worker

    def take(self, now: float) -> dict[str, Any]:
        """Count everything `now` (`time.monotonic()` seconds); return fields of `Progress`."""
        queue, fleet, counters = self._context.queue, self._context.fleet, self._context.counters
        counters.jobs = queue.counts()
        states = [worker.state for worker in fleet.workers]
        counters.workers = {state: states.count(state) for state in ("starting", "ready", "draining")}
        device = "gpu" if fleet.num_gpus_per_worker() else "cpu"
        num_held = counters.workers["ready"] + counters.workers["draining"]  # starting workers may wait for a node
        seconds = 0.0 if self._last is None else num_held * (now - self._last)
        counters.worker_seconds[device] = counters.worker_seconds.get(device, 0.0) + seconds
        self._context.spent.worker_seconds += seconds
        self._last = now
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
def served_metrics(context: DriverContext, config: EngineConfig, host: str, port: int) -> Iterator[None]:
    """Serve the driver's metrics and the discovery of all endpoints. Raises MetricsError."""
    store, fleet = context.run.store, context.fleet
    run_uri = store.uri if store.is_local else store.shown_uri  # an object store's URI may hold credentials
    pages = {
        exporter.DISCOVERY_PATH: lambda own_address: exporter.discovery_document(
            [own_address, *_addresses(fleet)], run_uri
        )
    }
    labels = Labels(model_name=config.model, drafter=config.engine, worker="driver")
    address, stop = serve(registry_of(lambda: driver_families(context.counters, labels)), port, pages, host)
    context.display.note(MetricsServed(address, address.removesuffix(METRICS_PATH) + exporter.DISCOVERY_PATH))
    try:
        yield
    finally:
        stop()


def _addresses(fleet: Fleet) -> list[str]:
    infos = [worker.info for worker in list(fleet.workers)]  # a copy, since the driver's loop changes the list
    return [info.metrics_address for info in infos if info is not None and info.metrics_address is not None]
