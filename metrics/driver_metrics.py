"""What the driver exports beside the totals of its workers."""

from __future__ import annotations

from metrics.counters import DriverCounters
from metrics.metric import Metric

Driver = Metric[DriverCounters]

DRIVER_METRICS = (
    Driver(
        "jobs",
        "gauge",
        "Jobs of the run, by state.",
        lambda c: c.jobs,
        "state",
        ("pending", "running", "finished", "failed", "cancelled"),
    ),
    Driver(
        "workers",
        "gauge",
        "Workers, by state: starting, ready, or writing their last checkpoints (draining).",
        lambda c: c.workers,
        "state",
        ("starting", "ready", "draining"),
    ),
    Driver(
        "worker_seconds_total",
        "counter",
        "Time that started workers were held, by device. A worker on a GPU has it to itself.",
        lambda c: c.worker_seconds,
        "device",
        ("cpu", "gpu"),
    ),
    Driver(
        "eta_seconds",
        "gauge",
        "Time left at the present speed if every job runs to its `max_tokens`; absent while nothing has a speed.",
        lambda c: c.eta_seconds,
    ),
    Driver(
        "preemptions_total",
        "counter",
        "Jobs taken back from a worker, by reason.",
        lambda c: c.num_preemptions,
        "reason",
        (
            "attempt_failed",
            "cluster_lost",
            "driver_stopped",
            "migrated",
            "node_drained",
            "store_failed",
            "worker_died",
            "worker_error",
            "worker_out_of_memory",
            "worker_silent",
            "worker_terminated",
            "worker_unreachable",
        ),
    ),
    Driver(
        "jobs_finished_total",
        "counter",
        "Jobs that ended without a result, by reason: given up after their attempts (failed), or cancelled.",
        lambda c: c.jobs_finished,
        "reason",
        ("failed", "cancelled"),
    ),
    Driver(
        "store_retries_total",
        "counter",
        "Reads and writes of the run folder that the driver tried again.",
        lambda c: c.num_store_retries,
    ),
)
