"""The settings that a user may give a run, each default once. Light: the command line shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swiftbatch.scheduler.driver.run_limits import Limits
from swiftbatch.worker.config import CheckpointSettings

if TYPE_CHECKING:
    from swiftbatch.jobs.run.shards import ShardSettings
    from swiftbatch.jobs.storage.retries import Retries

START_RETRY_SECONDS = 10.0  # for a store that fails before anything runs: a wrong address should show soon
WORKER_TIMEOUT = 120.0  # seconds without a report
STORE_SLACK_SECONDS = 30.0  # a worker that waits for the store is to say so before it is given up


@dataclass(frozen=True)
class Settings:
    """The settings of `submit` and `resume`; all but `said` may differ from one resume to the next."""

    said: Mapping[str, Any] = field(default_factory=dict)  # of the fields of `Computation`: those that were named
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    num_workers: int = 1  # they share the cores where no number of threads was asked for
    num_slots: int | None = None  # jobs at a time per worker; None for as many as its memory has room for
    kv_memory: float | None = None  # GB for the caches of each worker on CPUs; None for most of what is free
    address: str | None = None  # of a running cluster, whose devices are not this machine's; None: an embedded Ray
    max_attempts: int = 5
    worker_timeout: float | None = None  # seconds without a report; None for the default
    metrics_port: int | None = None
    metrics_host: str | None = None  # None: this machine alone where Ray is embedded, all interfaces on a cluster
    limits: Limits = field(default_factory=Limits)
    shards: ShardSettings | None = None  # of a submission, kept in the run; None: as the run has it

    @property
    def patience(self) -> float:
        """Seconds without a report after which a worker is replaced."""
        if self.worker_timeout is not None:
            return self.worker_timeout
        return max(WORKER_TIMEOUT, self.checkpoints.store_retry_seconds + STORE_SLACK_SECONDS)

    @property
    def start_retries(self) -> Retries:
        """The retries of the store, until something runs."""
        from swiftbatch.jobs.storage.retries import Retries

        return Retries(min(START_RETRY_SECONDS, self.checkpoints.store_retry_seconds))
