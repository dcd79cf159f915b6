"""The settings that a user may give a run, each default once. Light: the command line shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swiftbatch.jobs.storage.retries import START_RETRY_SECONDS, Retries
from swiftbatch.scheduler.driver.job_queue import MAX_ATTEMPTS
from swiftbatch.scheduler.driver.run_limits import Limits
from swiftbatch.scheduler.driver.worker_fleet import NUM_WORKERS, worker_patience
from swiftbatch.worker.config import CheckpointSettings

if TYPE_CHECKING:
    from swiftbatch.jobs.run.shards import ShardSettings


@dataclass(frozen=True)
class Settings:
    """The settings of `submit` and `resume`; all but `said` may differ from one resume to the next."""

    said: Mapping[str, Any] = field(default_factory=dict)  # of the fields of `Computation`: those that were named
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    num_workers: int = NUM_WORKERS  # they share the cores where no number of threads was asked for
    num_slots: int | None = None  # jobs at a time per worker; None for as many as its memory has room for
    kv_memory: float | None = None  # GB for the caches of each worker on CPUs; None for most of what is free
    address: str | None = None  # of a running cluster, whose devices are not this machine's; None: an embedded Ray
    max_attempts: int = MAX_ATTEMPTS
    worker_timeout: float | None = None  # seconds without a report; None for the default
    metrics_port: int | None = None
    metrics_host: str | None = None  # None: this machine alone where Ray is embedded, all interfaces on a cluster
    limits: Limits = field(default_factory=Limits)
    shards: ShardSettings | None = None  # of a submission, kept in the run; None: as the run has it

    @property
    def patience(self) -> float:
        """Seconds without a report after which a worker is replaced."""
        return worker_patience(self.worker_timeout, self.checkpoints.store_retry_seconds)

    @property
    def start_retries(self) -> Retries:
        """The retries of the store, until something runs."""
        return Retries(min(START_RETRY_SECONDS, self.checkpoints.store_retry_seconds))
