"""Counts that the driver takes at every beat: jobs and workers by state, and the time that workers were held."""

from __future__ import annotations

from metrics.counters import DriverCounters
from scheduler.driver.fleet import Fleet
from scheduler.driver.job_queue import JobQueue


class Census:
    """Keeps the driver's counters in step with its queue and its fleet."""

    def __init__(self, counters: DriverCounters, queue: JobQueue, fleet: Fleet) -> None:
        self._counters = counters
        self._queue = queue
        self._fleet = fleet
        self._last: float | None = None

    def take(self, now: float) -> None:
        """Count how things stand `now`, in `time.monotonic()` seconds."""
        counters = self._counters
        counters.jobs = self._queue.counts()
        counters.workers = self._workers()
        device = "gpu" if self._fleet.num_gpus_per_worker() else "cpu"
        # not those that start: they may wait for a node
        held = counters.workers["ready"] + counters.workers["draining"]
        seconds = 0.0 if self._last is None else held * (now - self._last)
        counters.worker_seconds[device] = counters.worker_seconds.get(device, 0.0) + seconds
        self._last = now

    def _workers(self) -> dict[str, int]:
        counts = {"starting": 0, "ready": 0, "draining": 0}
        for worker in self._fleet.workers:
            counts["draining" if worker.drain_reason else "ready" if worker.info else "starting"] += 1
        return counts
