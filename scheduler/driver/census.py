"""Counts that the driver takes at every beat: jobs and workers by state, and the time that workers were held."""

from __future__ import annotations

from scheduler.driver.context import Context


class Census:
    """Keeps the driver's counters in step with its queue and its fleet."""

    def __init__(self, context: Context) -> None:
        self._counters, self._queue, self._fleet = context.counters, context.queue, context.fleet
        self._last: float | None = None

    def take(self, now: float) -> None:
        """Count how things stand `now`, in `time.monotonic()` seconds."""
        counters = self._counters
        counters.jobs = self._queue.counts()
        states = [worker.state for worker in self._fleet.workers]
        counters.workers = {state: states.count(state) for state in ("starting", "ready", "draining")}
        device = "gpu" if self._fleet.num_gpus_per_worker() else "cpu"
        # not those that start: they may wait for a node
        held = counters.workers["ready"] + counters.workers["draining"]
        seconds = 0.0 if self._last is None else held * (now - self._last)
        counters.worker_seconds[device] = counters.worker_seconds.get(device, 0.0) + seconds
        self._last = now
