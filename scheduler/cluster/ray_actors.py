"""Calls to workers through Ray, and a dead worker's last log lines."""

from __future__ import annotations

import functools
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftbatch.jobs.errors import GPUFailedError, ModelError
from swiftbatch.jobs.storage.store import StoreError
from swiftbatch.scheduler.cluster import worker_code
from swiftbatch.scheduler.cluster.worker_actor import RefusedGPUs, WorkerInfo, WorkerSpec
from swiftbatch.scheduler.cluster.worker_code import STARTING, Code, OtherCodeError
from swiftbatch.worker.kv.kv_capacity import KVRoomError
from swiftbatch.worker.model.model_files import OtherModelError

if TYPE_CHECKING:
    from ray.exceptions import RayError

    from swiftbatch.worker.session.work_messages import WorkReport

STORE_FAILED = "store_failed"  # no access to the run folder
OTHER_MODEL = "other_model"  # another model than the run's
GPU_FAILED = "gpu_failed"  # its GPU no longer computes; no job is to blame
NODE_LOST = "node_lost"  # its node is gone, or cut off for too long
NODE_DRAINED = "node_drained"
TORCH_OUT_OF_MEMORY = "OutOfMemoryError"  # a GPU's; by name, so that the driver need not import torch
NO_MEMORY = "no_memory"  # too little memory to start; others may free some
OTHER_CODE = "other_code"  # other code than the driver's
NUM_LINES, MAX_CHARACTERS = 3, 400  # limits on a dead worker's log
READ_BYTES = 65_536  # read from the log's end
CRASH = "Fatal Python error"
LOST_NODE = "its node has died"  # Ray's wording; if it changes, the reason is just a dead worker

# Handles and references stay `Any`, since Ray only types decorated classes.


class WorkerLostError(RuntimeError):
    """A lost worker; `reason` is a label for metrics, `gpus` are its UUIDs if a GPU failed at the start."""

    def __init__(self, reason: str, message: str, gpus: tuple[str, ...] = ()) -> None:
        self.reason, self.gpus = reason, gpus
        super().__init__(message)


def create_actor(worker_id: str, spec: WorkerSpec, code: Code, *, num_cpus: int, num_gpus: int) -> Any:
    """Start a worker's process and return its handle at once."""
    options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "scheduling_strategy": "SPREAD"}
    # Ray must not restart it: a restarted actor has neither session nor jobs.
    actor = _actor_class().options(max_restarts=0, **options)
    return actor.remote(worker_id, code, spec.log_folder, pickle.dumps(spec))


@functools.cache
def _actor_class() -> Any:
    """Return the actor class, sent once: sending it again could hang."""
    import ray

    ray.cloudpickle.register_pickle_by_value(worker_code)
    return ray.remote(worker_code.WorkerProcess)


def wait(calls: list[Any], seconds: float) -> list[Any]:
    """Return the calls that end within `seconds`."""
    import ray

    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
    if not ready:
        ready, _ = ray.wait(calls, num_returns=1, timeout=seconds)
    return list(ready)


def answer(call: Any) -> WorkerInfo | RefusedGPUs | WorkReport:
    """Return the answer of an ended call. Raises WorkerLostError."""
    import ray

    try:
        result: WorkerInfo | RefusedGPUs | WorkReport = ray.get(call)
    except ray.exceptions.RayError as error:
        gpus = getattr(getattr(error, "cause", None), "gpus", ())
        raise WorkerLostError(*_explain(error), gpus) from error
    return result


def kill(actor: Any) -> None:
    import ray

    ray.kill(actor)


def _explain(error: RayError) -> tuple[str, str]:
    """Return the loss's reason, a label for metrics, and a message for people."""
    from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayTaskError

    if isinstance(error, RayTaskError):
        return _explain_cause(error.cause)
    if isinstance(error, RayActorError) and error.preempted:
        return NODE_DRAINED, "its node was drained"
    if isinstance(error, RayActorError) and LOST_NODE in str(error):
        return NODE_LOST, "its node is gone, or cut off"
    if isinstance(error, OutOfMemoryError):
        return "worker_out_of_memory", "its machine ran low on memory, and Ray ended it; fewer --slots need less"
    if isinstance(error, ActorUnavailableError):
        return "worker_unreachable", "it can't be reached"
    return "worker_died", "its process ended"


def _explain_cause(cause: Exception) -> tuple[str, str]:
    if isinstance(cause, OtherCodeError):
        return OTHER_CODE, str(cause)
    if isinstance(cause, OtherModelError):
        return OTHER_MODEL, str(cause)
    if isinstance(cause, GPUFailedError):
        return GPU_FAILED, str(cause)
    if isinstance(cause, ModelError):
        return "model_refused", str(cause)
    if isinstance(cause, StoreError):
        return STORE_FAILED, str(cause)
    if isinstance(cause, KVRoomError) or type(cause).__name__ == TORCH_OUT_OF_MEMORY:
        return NO_MEMORY, " ".join(str(cause).split())
    return "worker_error", " ".join(f"{type(cause).__name__}: {cause}".split())


def last_words(log_folder: str | None, worker_id: str) -> str:
    """Return the last lines of a worker's log that are from its current process."""
    if log_folder is None:
        return ""
    try:
        with (Path(log_folder) / f"{worker_id}.log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    written = text.rpartition(STARTING.partition("{}")[0])[2].splitlines()[1:]
    lines = [" ".join(line.split()) for line in written if line.strip()]
    crash = next((number for number, line in enumerate(lines) if line.startswith(CRASH)), None)
    told = lines[-NUM_LINES:] if crash is None else lines[crash : crash + 1]
    return f"; its last lines: {' | '.join(told)[-MAX_CHARACTERS:]}" if told else ""
