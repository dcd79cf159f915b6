"""The counters of `swiftbatch serve` and the names of their metrics."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from swiftbatch.metrics.metric import exported, metrics_of

UNAUTHORIZED = 401
BATCH_STATES = ("waiting", "running", "ending")


OF_RECORDS = ", by the key's name; summed over the records of all batches, so that a restart changes nothing."


@dataclass
class ServerCounters:
    """The server's figures: requests by status, and batches that have not ended."""

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
    num_refused_keys: int = exported(
        "serve_refused_keys_total", "Requests and logins without a key that is known here: status 401."
    )
    oldest_waiting_seconds: float = exported(
        "serve_oldest_waiting_seconds",
        "Time since the oldest batch was made that waits for others; 0 if none does.",
        kind="gauge",
        start=float,
    )
    disk: dict[str, int] = exported(
        "serve_disk_bytes",
        "The disk of the server's folder: what is used, and what is free for it. Absent for an object store.",
        kind="gauge",
        by="state",
        start=dict,
    )
    team_input_tokens: dict[str, float] = exported(
        "serve_input_tokens_total",
        "Prompt tokens of lines in output files" + OF_RECORDS,
        by="team",
        start=dict,
    )
    team_output_tokens: dict[str, float] = exported(
        "serve_output_tokens_total",
        "Generated tokens of lines in output files" + OF_RECORDS,
        by="team",
        start=dict,
    )
    team_generated_tokens: dict[str, float] = exported(
        "serve_generated_tokens_total",
        "Tokens generated, also by batches that run and for lines that were given up" + OF_RECORDS,
        by="team",
        start=dict,
    )
    team_worker_seconds: dict[str, float] = exported(
        "serve_worker_seconds_total",
        "Time from a worker's readiness to its end" + OF_RECORDS,
        by="team",
        start=dict,
    )
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count_request(self, status: int) -> None:
        with self.lock:
            self.num_requests[f"{status // 100}xx"] += 1
            self.num_refused_keys += status == UNAUTHORIZED

    def count_ended(self, state: str) -> None:
        with self.lock:
            self.num_ended_batches[state] += 1


SERVER_METRICS = metrics_of(ServerCounters)
