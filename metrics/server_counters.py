"""The counters of `swiftbatch serve`, and the names under which they are exported."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from swiftbatch.metrics.metric import exported, metrics_of

BATCH_STATES = ("waiting", "running", "ending")


@dataclass
class ServerCounters:
    """The figures that only the server sees: requests by their answer, and the batches that have not ended."""

    batches: dict[str, int] = exported(
        "serve_batches",
        "Batches that have not ended, by where they are: waiting, running, or ending (their files are written).",
        kind="gauge",
        by="stage",
        known=BATCH_STATES,
    )
    num_ended_batches: Counter[str] = exported(
        "serve_ended_batches_total",
        "Batches that have ended since the server began, by their state.",
        by="state",
        known=("completed", "failed", "expired", "cancelled"),
    )
    num_requests: Counter[str] = exported(
        "serve_requests_total",
        "Requests, by the first figure of their HTTP status.",
        by="status",
        known=("2xx", "3xx", "4xx", "5xx"),
    )
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count_request(self, status: int) -> None:
        with self.lock:
            self.num_requests[f"{status // 100}xx"] += 1

    def count_ended(self, state: str) -> None:
        with self.lock:
            self.num_ended_batches[state] += 1


SERVER_METRICS = metrics_of(ServerCounters)
