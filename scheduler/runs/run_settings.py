"""The settings of a run and of a server with their defaults, without heavy imports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swiftbatch.jobs.storage.retries import START_RETRY_SECONDS, Retries
from swiftbatch.scheduler.driver.job_queue import MAX_ATTEMPTS
from swiftbatch.scheduler.driver.run_limits import Limits
from swiftbatch.scheduler.driver.worker_fleet import NUM_WORKERS, worker_patience
from swiftbatch.worker.config import CheckpointSettings, NumGPUs

if TYPE_CHECKING:
    from swiftbatch.jobs.run.shards import ShardSettings
    from swiftbatch.scheduler.display.webhooks import Receiver


@dataclass(frozen=True)
class Settings:
    """The settings of `submit` and `resume`; a resume may change all except `said`."""

    said: Mapping[str, Any] = field(default_factory=dict)  # named fields of `Computation`
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    num_workers: int = NUM_WORKERS  # they share the cores if no thread count is given
    num_gpus_per_worker: NumGPUs | None = None  # they share each forward; None: the fewest that hold model and a job
    num_slots: int | None = None  # jobs at a time per worker; None: as many as fit in memory
    kv_memory: float | None = None  # GB of caches per CPU worker; None: most of the free memory
    address: str | None = None  # a running cluster's, with its own devices; None: embedded Ray
    max_attempts: int = MAX_ATTEMPTS
    worker_timeout: float | None = None  # seconds without a report; None: the default
    metrics_port: int | None = None
    metrics_textfile: str | None = None  # for node-exporter; None: no file
    metrics_host: str | None = None  # None: this machine if Ray is embedded, else all interfaces
    limits: Limits = field(default_factory=Limits)
    shards: ShardSettings | None = None  # kept in the run; None: as the run has it
    team: str | None = None  # likewise
    price_per_worker_hour: float | None = None  # in the user's currency; None: the run's

    @property
    def patience(self) -> float:
        """Return the seconds without a report until a worker is replaced."""
        return worker_patience(self.worker_timeout, self.checkpoints.store_retry_seconds)

    @property
    def start_retries(self) -> Retries:
        return Retries(min(START_RETRY_SECONDS, self.checkpoints.store_retry_seconds))


@dataclass(frozen=True)
class ServeOptions:
    """The options of a server.

    Without `api_keys` everybody at the port has all rights, which `is_open` confirms.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    max_running: int = 1  # batches at a time
    max_file_bytes: int = 2 * 2**30
    api_keys: str | None = None
    is_open: bool = False
    webhook: Receiver | None = None
    webhook_hosts: str | None = None
