"""The JSON files of a run (run.json, progress, claims), its format number, and readers that refuse a bad file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from swiftbatch.jobs.checkpoints.timeline import Moment
from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.input.validation_errors import reasons, shown
from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.repetition_detection import LoopAction
from swiftbatch.jobs.run.compute_options import (
    AttentionName,
    Device,
    Dtype,
    KVDtype,
    LinearName,
    LogprobsMode,
    NumRows,
    ThinkingMarkers,
)
from swiftbatch.jobs.sampling_params import ThinkingEnd
from swiftbatch.jobs.storage.store import Store

Exactness = Literal["exact", "exact up to ties", "not probed"]
RunState = Literal["running", "finished", "cancelled", "interrupted"]


class ProcessKey(Frozen):
    """Tells a process from others with its number; `start_ticks` is when it began, counted from its system's start."""

    boot_id: str
    pid_namespace: str
    start_ticks: int


class RunManifest(Frozen):
    """All settings of a run that decide its bytes. `created` is in seconds since the epoch.

    `version` is that of the whole folder: raise it with every change of a file in it. Other versions are refused.
    """

    version: Literal[2] = 2
    run_id: str
    created: Moment
    model: str
    model_fingerprint: str
    text_fingerprint: str  # of chat template and further files of the tokenizer
    model_files: dict[str, str]  # the SHA-256 of each of its files, by its place
    model_commit: str | None = None  # of a model of the hub; None for others
    engine: str
    draft_model: str | None = None  # folder of the engine's trained parts; None: the model's own
    kv_offload: str | None = None  # folder that key-value caches are kept in; None: on the device
    dtype: Dtype
    kv_dtype: KVDtype | None = None  # of keys and values; None: as `dtype`
    device: Device
    attention: AttentionName = "triton"
    linear: LinearName = "cublas"
    num_rows: NumRows = 64  # of every forward on a GPU
    num_threads: int = Field(ge=1)
    seed: int
    max_tokens: int | None = Field(default=None, ge=1)  # of jobs that give none; None: all that their prompts leave
    loop_guard: LoopAction | None = None  # of jobs that say nothing of loops; None: loops are not looked for
    thinking_end: ThinkingEnd | None = None  # of jobs that say nothing of it; None: a text may end within a thought
    logprobs_mode: LogprobsMode = "raw_logprobs"  # the source of the log-probabilities that jobs ask for
    thinking_markers: ThinkingMarkers = None  # () for a model that does not think
    clock: str  # the ISO time that chat templates hear
    reads_clock: bool = False  # its chat template
    versions: dict[str, str]
    exactness: Exactness
    cpu_capability: str

    @property
    def stored_model(self) -> str:
        """The model's name with the commit that the run was made with, where it is one of the hub."""
        return self.model if self.model_commit is None else f"{self.model.partition('@')[0]}@{self.model_commit}"

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides a job's tokens beside its id, but for the hardware."""
        model = [self.model_fingerprint, self.text_fingerprint, self.thinking_markers]
        later: list[str] = [] if self.kv_dtype is None else [self.kv_dtype]
        later += [self.clock] if self.reads_clock else []
        decisive = json.dumps([*model, self.dtype, self.logprobs_mode, *later])
        return f"fp_{hashlib.sha256(decisive.encode()).hexdigest()[:16]}"


class WorkerStatus(Frozen):
    """One worker and its jobs, by the names that `Progress.running` has; `numerics` says what decides the bits there.

    `last_checkpoint` is when it last wrote one, or when its work began, in seconds since the epoch; None without a job.
    """

    id: str
    host: str
    pid: int
    node_id: str = ""  # Ray's
    numerics: str = ""
    jobs: tuple[str, ...] = ()
    metrics_address: str | None = None
    tokens_per_second: float = 0.0
    last_checkpoint: Moment | None = None


class Progress(Frozen):
    """The driver's heartbeat: times in seconds since the epoch, `jobs` counts by state (pending, running, ...).

    `running` holds the tokens of each running job by its `custom_id` (`custom_id[1]` is a line's second choice),
    `epoch` is the number of the driver's claim. In a driver's last beat, `running` holds the jobs that it had to leave
    without a whole checkpoint. `max_tokens` says how many tokens the running jobs may get, `num_tokens_left` how many
    all unfinished jobs may get. `num_total_tokens` (generated in all attempts, lost ones included) and `worker_seconds`
    (that started workers were held) are over all drivers of the run, and `reached_limit` says where the last one was to
    stop. `num_preemptions` (by reason), `num_resumes` (by kind), `mean_acceptance_length`, `num_tokens_by_draft` (none,
    tree, chain), `num_read_tokens` (of prompts and replays) and `num_copied_tokens` (which did not have to be read) are
    of this driver's time.
    """

    state: RunState
    updated: Moment
    started: Moment
    jobs: dict[str, int]
    running: dict[str, int] = Field(default_factory=dict)
    max_tokens: dict[str, int] = Field(default_factory=dict)
    num_generated_tokens: int
    num_total_tokens: int = 0
    worker_seconds: float = 0.0
    reached_limit: str | None = None
    num_tokens_left: int = 0
    tokens_per_second: float
    eta_seconds: float | None
    workers: tuple[WorkerStatus, ...]
    num_starting_workers: int = 0
    num_preemptions: dict[str, int] = Field(default_factory=dict)
    num_resumes: dict[str, int] = Field(default_factory=dict)
    mean_acceptance_length: float | None = None  # tokens per draft; None before the first
    num_tokens_by_draft: dict[str, int] = Field(default_factory=dict)
    num_read_tokens: int = 0
    num_copied_tokens: int = 0
    num_rejects: int = 0  # lines of the newest job file
    driver_host: str
    driver_pid: int
    driver_process: ProcessKey | None = None  # None where the driver's system does not say
    epoch: int = 0


class DriverClaim(Frozen):
    """A driver's claim on the run: the driver with the newest claim holds it. `started` in seconds since the epoch."""

    host: str
    pid: int
    process: ProcessKey | None = None
    driver_id: str  # random, since hosts and processes may look alike
    started: Moment


# Read the files of a run, and say plainly what is wrong with one that can't be used.


NUM_READERS = 16  # at once: an object store takes its time for each
NUM_READ_AHEAD = 64

Model = TypeVar("Model", bound=BaseModel)
Value = TypeVar("Value")


class RunError(UserError):
    """The folder holds no run, or one that does not fit."""


class DamagedError(RunError):
    """A file was read, and what is in it can't be used: `path` names it below its folder, `problem` says why."""

    def __init__(self, store: Store, path: str, problem: str) -> None:
        super().__init__(_unusable(store, path, problem))
        self.path = path
        self.problem = problem


def pretty(model: BaseModel) -> bytes:
    """A model as JSON for the eye."""
    return model.model_dump_json(indent=2).encode() + b"\n"


def read_parsed(store: Store, path: str, parse: Callable[[bytes], Value]) -> Value | None:
    """Parse a file; None if it is absent. Raises `DamagedError` where `parse` raises `ValueError`."""
    data = store.read(path)
    if data is None:
        return None
    try:
        return parse(data)
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError(store, path, " ".join(str(error).split())) from None


def read_object(store: Store, path: str) -> dict[str, Any] | None:
    """The JSON object in a file; None when it is absent. Raises `DamagedError`."""
    return read_parsed(store, path, _parse_object)


def read_model(store: Store, path: str, model: type[Model]) -> Model | None:
    """The model that a file holds as JSON; None when it is absent.

    Raises `DamagedError`, another `RunError` for another version's.
    """

    def parse(data: bytes) -> Model:
        values = _parse_object(data)
        if "version" in model.model_fields:
            _refuse_other_version(store, path, values.get("version"), model.model_fields["version"].default)
        try:
            return model.model_validate(values)
        except ValidationError as error:
            raise ValueError(reasons(error, model)) from None

    return read_parsed(store, path, parse)


def _refuse_other_version(store: Store, path: str, found: Any, expected: int) -> None:
    """Raise `RunError`, which is no `DamagedError`: the file is whole for another swiftbatch."""
    if found != expected:
        problem = f"found version {'none' if found is None else shown(found)}, expected version {expected}"
        raise RunError(_unusable(store, path, problem, "use the version of swiftbatch that made it"))


def _unusable(store: Store, path: str, problem: str, remedy: str = "restore it or use another folder") -> str:
    return f"cannot use {path} in {store.shown_uri}: {problem}; {remedy}"


def _parse_object(data: bytes) -> dict[str, Any]:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise TypeError(f"found a {type(value).__name__}, expected a JSON object")
    return value
