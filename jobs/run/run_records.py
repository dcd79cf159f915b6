"""The JSON files of a run, its format number, and strict readers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from swiftbatch.jobs.checkpoints.checkpoint_files import Moment
from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.json_records import Frozen, reasons, shown
from swiftbatch.jobs.sampling_params import LoopAction, ThinkingEnd
from swiftbatch.jobs.storage.store import Store

REVISED = re.compile(r"((?:hf:)?[^@:]*)(?:@[^:]*)?")  # a hub name up to its revision; a file may follow

Dtype = Literal["bfloat16", "float32"]
KVDtype = Literal["fp8", "int8"]  # None: as the run's dtype
Device = Literal["auto", "cpu", "cuda"]
AttentionName = Literal["triton", "flash"]  # GPUs only
LinearName = Literal["cublas", "triton", "int8"]  # the last on CPUs only, the others on GPUs
NumRows = Literal[64, 128, 256]  # rows of every forward on a GPU

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""The source of log-probabilities: the model's logits, or the scores that are drawn from. The names are vLLM's."""
SamplingDefaults = Literal["model", "openai"]
"""The source of sampling fields that a line leaves out: the model's generation config, or OpenAI's defaults."""
ThinkingMarkers = tuple[str, str] | tuple[()] | None
"""The texts around a thought, () if a model has none; None if each worker is to look for them."""


Exactness = Literal["exact", "exact up to ties", "not probed"]
RunState = Literal["running", "finished", "cancelled", "interrupted"]


class ProcessKey(Frozen):
    """Identifies a process; `start_ticks` count from the system's boot."""

    boot_id: str
    pid_namespace: str
    start_ticks: int


def at_commit(model: str, commit: str | None) -> str:
    """Put a commit in place of the revision of a hub name."""
    return model if commit is None else REVISED.sub(rf"\1@{commit}", model, count=1)


class RunManifest(Frozen):
    """All settings of a run that decide its bytes.

    `version` covers the whole folder: raise it with any change of a format.
    """

    version: Literal[2] = 2
    run_id: str
    created: Moment
    model: str
    model_fingerprint: str
    text_fingerprint: str  # hash of the chat template and other tokenizer files
    model_files: dict[str, str]  # SHA-256 of each file, by path
    model_commit: str | None = None  # commit of a hub model; None for others
    engine: str
    engine_options: tuple[str, ...] = ()  # NAME=VALUE; they change drafts alone
    draft_model: str | None = None  # folder of the engine's trained parts; None: the model's own
    kv_offload: str | None = None  # folder for a CPU's key-value caches; None: in memory
    dtype: Dtype
    kv_dtype: KVDtype | None = None  # type of keys and values; None: as `dtype`
    lora: tuple[str, ...] = ()  # NAME=PLACE of adapters that lines may name
    lora_files: dict[str, dict[str, str]] = Field(default_factory=dict)  # by name, the SHA-256 of each file
    lora_commits: dict[str, str] = Field(default_factory=dict)  # by name, for those on the hub
    device: Device
    attention: AttentionName = "triton"
    linear: LinearName = "cublas"
    num_rows: NumRows = 64  # rows of every forward on a GPU
    num_threads: int = Field(ge=1)
    seed: int
    max_tokens: int | None = Field(default=None, ge=1)  # default for jobs; None: the rest of the context
    loop_guard: LoopAction | None = None  # default for jobs; None: loops are not detected
    thinking_end: ThinkingEnd | None = None  # default for jobs; None: a text may end inside a thought
    logprobs_mode: LogprobsMode = "raw_logprobs"  # source of reported log-probabilities
    sampling_defaults: SamplingDefaults = "openai"  # for lines that leave fields out
    lenient_schemas: bool = False  # keywords that a grammar cannot hold are left out
    plain_content: bool = False  # texts that spell control tokens stay texts
    thinking_markers: ThinkingMarkers = None  # () for a model that does not think
    clock: str  # the ISO time given to chat templates
    reads_clock: bool = False  # its chat template uses `clock`
    team: str | None = None  # a label of its metrics
    versions: dict[str, str]
    exactness: Exactness
    cpu_capability: str

    @property
    def stored_model(self) -> str:
        return at_commit(self.model, self.model_commit)

    @property
    def fingerprint(self) -> str:
        """Return a hash of all that decides a job's tokens besides its id and the hardware."""
        model = [self.model_fingerprint, self.text_fingerprint, self.thinking_markers]
        later: list[str] = [] if self.kv_dtype is None else [self.kv_dtype]
        later += [self.clock] if self.reads_clock else []
        later += ["lenient_schemas"] if self.lenient_schemas else []
        later += ["plain_content"] if self.plain_content else []
        later += [json.dumps(self.lora_files, sort_keys=True)] if self.lora_files else []
        decisive = json.dumps([*model, self.dtype, self.logprobs_mode, *later])
        return f"fp_{hashlib.sha256(decisive.encode()).hexdigest()[:16]}"


class WorkerStatus(Frozen):
    """One worker and its jobs, named as in `Progress.running`.

    `last_checkpoint` is the time of its last write, or when its work began if it wrote nothing, in seconds since the
    epoch; None if it has no job.
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
    """The driver's heartbeat; times in seconds since the epoch, `jobs` counts by state.

    `running` maps jobs (`custom_id[1]` is a second choice) to tokens; in the last heartbeat it has the jobs whose
    checkpoints are incomplete. `epoch` is the number of the driver's claim. `max_tokens` limits the tokens of the
    running jobs, `num_tokens_left` those of all unfinished jobs.

    `num_total_tokens` (all attempts) and `worker_seconds` cover all drivers; `reached_limit` stopped the last one.
    `price_per_worker_hour` is the newest one given, in the user's currency.
    Other counts are this driver's: `num_preemptions` by reason, `num_resumes` by kind, `num_tokens_by_draft` (none,
    tree, chain), `num_read_tokens` of prompts and replays, `num_copied_tokens` that needed no reading.
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
    price_per_worker_hour: float | None = None
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
    driver_process: ProcessKey | None = None  # None if the system does not say
    epoch: int = 0

    @property
    def cost(self) -> float | None:
        return cost_of(self.worker_seconds, self.price_per_worker_hour)

    @property
    def cost_per_token(self) -> float | None:
        """Return the share of the cost that each generated token has; None without a price or tokens."""
        return None if self.cost is None or not self.num_generated_tokens else self.cost / self.num_generated_tokens


def cost_of(worker_seconds: float, price_per_worker_hour: float | None) -> float | None:
    """Return the cost of worker time in the price's currency; None without a price."""
    return None if price_per_worker_hour is None else worker_seconds / 3600 * price_per_worker_hour


class DriverClaim(Frozen):
    """A driver's claim on the run; the driver with the newest claim holds the run."""

    host: str
    pid: int
    process: ProcessKey | None = None
    driver_id: str  # random, since hosts and processes may look alike
    started: Moment


# Readers of a run's files with plain error texts.


NUM_READERS = 16  # parallel reads, because of an object store's latency
NUM_READ_AHEAD = 64

Model = TypeVar("Model", bound=BaseModel)
Value = TypeVar("Value")
Item = TypeVar("Item")


def in_parallel(call: Callable[[Item], Value], items: Iterable[Item]) -> list[Value]:
    """Return what the call returns for each item; calls wait for a store together."""
    with ThreadPoolExecutor(NUM_READERS) as pool:
        return list(pool.map(call, items))


class RunError(UserError):
    """A folder without a run, or with one that does not fit."""


class DamagedError(RunError):
    """A file with unusable content: `path` below its folder, and `problem`."""

    def __init__(self, store: Store, path: str, problem: str) -> None:
        super().__init__(_unusable(store, path, problem))
        self.path = path
        self.problem = problem


def pretty(model: BaseModel) -> bytes:
    return model.model_dump_json(indent=2).encode() + b"\n"


def read_parsed(store: Store, path: str, parse: Callable[[bytes], Value]) -> Value | None:
    """Parse a file; return None if it is absent. Raises `DamagedError` if `parse` raises `ValueError`."""
    data = store.read(path)
    if data is None:
        return None
    try:
        return parse(data)
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError(store, path, " ".join(str(error).split())) from None


def read_object(store: Store, path: str) -> dict[str, Any] | None:
    """Read a file's JSON object; return None if the file is absent. Raises `DamagedError`."""
    return read_parsed(store, path, _parse_object)


def read_model(store: Store, path: str, model: type[Model]) -> Model | None:
    """Read a JSON file into a `model`; return None if absent. Raises `DamagedError`, `RunError` for another version."""

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
    """Raise `RunError`, not `DamagedError`: the file is intact for another swiftbatch."""
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
