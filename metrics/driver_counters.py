"""The counters that the driver keeps beside its workers', and the names under which they are exported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from swiftbatch.metrics.metric import exported, metrics_of
from swiftbatch.metrics.worker_counters import EngineCounters

OUTGROWN = "memory_full"  # the reason of a preemption by a worker whose caches have outgrown its memory
PREEMPTION_REASONS = (
    *("attempt_failed", "cluster_lost", "driver_stopped", OUTGROWN, "migrated", "node_drained", "node_lost"),
    *("store_failed", "worker_died", "worker_error", "worker_out_of_memory", "worker_silent"),
    *("worker_terminated", "worker_unreachable"),
)


@dataclass
class DriverCounters:
    """The driver's own figures: jobs by state, what it took back from workers or gave up, and all workers' counts."""

    jobs: dict[str, int] = exported(
        "jobs",
        "Jobs of the run, by state.",
        kind="gauge",
        by="state",
        known=("pending", "running", "finished", "failed", "cancelled"),
    )
    workers: dict[str, int] = exported(
        "workers",
        "Workers, by state: starting, ready, or writing their last checkpoints (draining).",
        kind="gauge",
        by="state",
        known=("starting", "ready", "draining"),
    )
    worker_seconds: dict[str, float] = exported(
        "worker_seconds_total",
        "Time that started workers were held, by device. A worker on a GPU has it to itself.",
        by="device",
        known=("cpu", "gpu"),
    )
    eta_seconds: float | None = exported(
        "eta_seconds",
        "Time left at the present speed if every job runs to its `max_tokens`; absent while nothing has a speed.",
        kind="gauge",
        start=lambda: None,
    )
    num_preemptions: Counter[str] = exported(
        "preemptions_total", "Jobs taken back from a worker, by reason.", by="reason", known=PREEMPTION_REASONS
    )
    jobs_finished: Counter[str] = exported(
        "jobs_finished_total",
        "Jobs that ended without a result, by reason: given up after their attempts (failed), or cancelled.",
        by="reason",
        known=("failed", "cancelled"),
    )
    num_store_retries: int = exported(
        "store_retries_total", "Reads and writes of the run folder that the driver tried again."
    )
    by_worker: dict[str, EngineCounters] = field(default_factory=dict)  # newest counts, lost workers' included

    def count_store_retry(self) -> None:
        self.num_store_retries += 1

    def take_in(self, worker_id: str, counters: EngineCounters) -> None:
        """Keep all that a worker has counted since it started. No two workers of one driver have the same id."""
        self.by_worker[worker_id] = counters

    def totals(self, names: Collection[str] | None = None) -> EngineCounters:
        """The counts of all workers and the driver's own, added up; a worker that is lost takes nothing away.

        Who asks at every beat names the fields: there may be a thousand workers. What a killed worker counted after its
        last report is not in there.
        """
        sums = EngineCounters(num_store_retries=self.num_store_retries, jobs_finished=Counter(self.jobs_finished))
        for counters in list(self.by_worker.values()):
            sums.add(counters, names)
        return sums


DRIVER_METRICS = metrics_of(DriverCounters)
