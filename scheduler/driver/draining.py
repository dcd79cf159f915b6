"""Workers that are to end: they write their checkpoints first, and hand their jobs back."""

from __future__ import annotations

import time

from scheduler.display.display import Display
from scheduler.display.events import WorkerStopping
from scheduler.driver.fleet import Fleet, Worker


class Draining:
    """Has workers drain, each within a grace period."""

    def __init__(self, fleet: Fleet, display: Display, grace_seconds: float) -> None:
        self._fleet = fleet
        self._display = display
        self._grace_seconds = grace_seconds

    def mark_leaving(self) -> None:
        """Mark workers whose node is about to go. Raises ClusterLostError if all of them are."""
        for worker, seconds in self._fleet.leaving():
            self._display.note(WorkerStopping(worker.id, "node_drained"))
            self._mark(worker, "node_drained", seconds)

    def mark_all(self, reason: str) -> None:
        """Mark every worker; `reason` is a word for the metrics."""
        for worker in self._fleet.workers:
            self._mark(worker, reason, self._grace_seconds)

    def go_on(self) -> None:
        """Call in the checkpoints of marked workers whose slice has ended, and end those that have no job."""
        for worker in [worker for worker in self._fleet.workers if worker.is_idle and worker.drain_reason is not None]:
            if worker.job_ids:
                self._fleet.drain(worker, max(0.0, worker.drain_by - time.monotonic()))
            else:
                self._fleet.retire(worker)

    def _mark(self, worker: Worker, reason: str, seconds: float) -> None:
        if worker.drain_reason is None:
            worker.drain_reason = reason
            worker.drain_by = time.monotonic() + min(self._grace_seconds, max(0.0, seconds))
