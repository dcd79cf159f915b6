"""The settings of workers, and the start of a worker's session in its process."""

from __future__ import annotations

import importlib
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swiftbatch.jobs.errors import GPUFailedError
from swiftbatch.jobs.start_times import SECONDS, timed
from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.forward.nvml import own_gpus
from swiftbatch.worker.kv.kv_capacity import HeldPositions, PoolSize

if TYPE_CHECKING:
    from swiftbatch.worker.session.session import WorkerSession

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name
SESSION_FACTORY = "swiftbatch.worker.session.session:WorkerSession"


@dataclass(frozen=True)
class WorkerSpec:
    """The start settings of all workers of a run."""

    config: EngineConfig
    run_uri: str
    metrics_host: str | None = None  # address of an endpoint on a free port; None: no endpoint
    session_factory: str = SESSION_FACTORY  # "module:name", called like `WorkerSession`
    log_folder: str | None = None  # a local folder; None leaves logs to Ray


@dataclass(frozen=True)
class WorkerInfo:
    """A started worker's place and resources; `node_id` is Ray's id of its node."""

    host: str
    pid: int
    metrics_address: str | None
    node_id: str
    numerics: str
    num_free_positions: int
    num_slots: int | None = None
    num_state_positions: int = 0  # a job's extra positions for layer states
    pool_size: PoolSize | None = None  # pages of the shared caches on a GPU
    held_positions: HeldPositions | None = None  # positions held per job if layers forget some; None for all
    gpus: tuple[str, ...] = ()  # UUIDs
    start_seconds: Mapping[str, float] = field(default_factory=dict)  # what the start did, such as "weights"


@dataclass(frozen=True)
class RefusedGPUs:
    """The answer of a process with a GPU that failed too often. It holds its GPUs, so that no worker gets them."""

    gpus: tuple[str, ...]


def prefer_expandable_segments() -> None:
    """Let a GPU's memory not fragment, unless the user has set torch's allocator; torch must not be imported yet."""
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def start_session(
    worker_id: str, spec: WorkerSpec, failed_gpus: frozenset[str]
) -> tuple[WorkerSession | None, WorkerInfo | RefusedGPUs]:
    """Load the model in this process, which is an actor of Ray and drains at SIGTERM and SIGINT.

    Raises GPUFailedError with the UUIDs of its GPUs, and as the session.
    """
    import ray

    seen = () if spec.config.device == "cpu" else own_gpus()[: spec.config.num_gpus_per_worker]
    gpus = tuple(gpu.uuid for gpu in seen)
    if not failed_gpus.isdisjoint(gpus):
        return None, RefusedGPUs(gpus)
    prefer_expandable_segments()
    module, _, name = spec.session_factory.partition(":")
    with timed("imports"):
        factory = getattr(importlib.import_module(module), name)
    try:
        with timed("session"):
            session: WorkerSession = factory(spec.config, spec.run_uri, worker_id, spec.metrics_host)
    except GPUFailedError as error:
        error.gpus = gpus
        raise
    for number in (signal.SIGTERM, signal.SIGINT):  # Ray would end a call at SIGINT with a traceback
        signal.signal(number, lambda _number, _frame: session.request_drain())
    node_id = str(ray.get_runtime_context().get_node_id())
    where = (socket.gethostname(), os.getpid(), session.metrics_address, node_id)
    sizes = (session.num_free_positions, session.num_slots, session.num_state_positions, session.pool_size)
    return session, WorkerInfo(*where, session.numerics, *sizes, session.held_positions, gpus, dict(SECONDS))
