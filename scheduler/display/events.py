"""The events of a run and its jobs, as text for people and objects for programs."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from swiftbatch.scheduler.display.progress_line import counted, job_counts, printable

NUM_REJECTS_SHOWN = 5


@dataclass(frozen=True)
class Event:
    """An event; as a string it is text for people, or empty."""

    is_error: ClassVar[bool] = False  # also shown with `--quiet`, and on stderr

    text: ClassVar[str] = ""  # a template with the fields' names

    def __str__(self) -> str:
        shown = {name: printable(value) if isinstance(value, str) else value for name, value in vars(self).items()}
        return self.text.format_map(shown)

    @classmethod
    def kind(cls) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class LineRejected(Event):
    """A line of a job file was rejected, the `number`th of `num_rejects` (from 1); `file` is named if there are
    several.
    """

    is_error: ClassVar[bool] = True
    line_number: int
    custom_id: str | None
    reason: str
    number: int
    num_rejects: int
    file: str | None = None

    def __str__(self) -> str:
        if self.number > NUM_REJECTS_SHOWN + 1:
            return ""
        if self.number > NUM_REJECTS_SHOWN:
            return f"and {self.num_rejects - NUM_REJECTS_SHOWN} more rejected lines, all in rejects.jsonl"
        custom_id = f" ({printable(self.custom_id)})" if self.custom_id else ""
        place = f"line {self.line_number}" if self.file is None else f"{printable(self.file)}:{self.line_number}"
        return f"rejected {place}{custom_id}: {printable(self.reason)}"


@dataclass(frozen=True)
class FieldsWithoutEffect(Event):
    """Some lines have `fields` without effect here, each with its number of lines."""

    fields: dict[str, int]

    def __str__(self) -> str:
        found = ", ".join(
            f"{printable(name)} ({counted(count, 'line')})" for name, count in sorted(self.fields.items())
        )
        return f"fields without effect here: {found}"


@dataclass(frozen=True)
class ColumnsKept(Event):
    """`--keep-columns` takes these `columns` along to the output, each with its number of lines."""

    columns: dict[str, int]

    def __str__(self) -> str:
        found = ", ".join(
            f"{printable(name)} ({counted(count, 'line')})" for name, count in sorted(self.columns.items())
        )
        return f"columns that are no field travel to the output: {found}"


@dataclass(frozen=True)
class LinesNamed(Event):
    """`num_lines` lines without a `custom_id` are named after file and line, such as `example`."""

    num_lines: int
    example: str

    def __str__(self) -> str:
        found = counted(self.num_lines, "line")
        return f"{found} without custom_id: named after file and line, such as {printable(self.example)}"


@dataclass(frozen=True)
class ModelSamplesBy(Event):
    """The model's own values of sampling `fields` hold for lines that leave them out."""

    fields: dict[str, float]

    def __str__(self) -> str:
        found = ", ".join(f"{name} {value:g}" for name, value in self.fields.items())
        return f"where lines do not say otherwise, the model's own sampling holds: {found}"


@dataclass(frozen=True)
class RunFolderChosen(Event):
    """No `--run` was given: the run's folder is `run`."""

    run: str

    def __str__(self) -> str:
        return f"the run's folder is {printable(self.run)} (--run chooses another)"


@dataclass(frozen=True)
class RunOpened(Event):
    """The run folder `run` is open with `num_jobs` jobs of this submission, or of the resumed run."""

    run: str
    run_id: str
    num_jobs: int

    def __str__(self) -> str:
        return f"{counted(self.num_jobs, 'job')} in {printable(self.run)}"


@dataclass(frozen=True)
class ErrorsCleared(Event):
    """`resume --retry-failed` makes failed and cancelled jobs pending again."""

    text: ClassVar[str] = "{num_jobs} failed or cancelled jobs are to be run again"
    num_jobs: int


@dataclass(frozen=True)
class MetricsServed(Event):
    """The driver's metrics are at `address`, and Prometheus' list of all workers at `discovery_address`."""

    text: ClassVar[str] = "metrics of the driver at {address} and where to find all workers' at {discovery_address}"
    address: str
    discovery_address: str


@dataclass(frozen=True)
class SlowOnGpu(Event):
    """The GPU kernels do not support the model, for a `reason`; each forward takes thousands of launches."""

    text: ClassVar[str] = (
        "the model runs through the layers of transformers on a GPU, which is slow: {reason}; "
        "`swiftbatch inspect` shows it beforehand"
    )
    reason: str


@dataclass(frozen=True)
class StoreAway(Event):
    """The run's store at `place` fails for a while; the driver retries for at most `seconds`."""

    is_error: ClassVar[bool] = True
    text: ClassVar[str] = "{place} does not answer; trying again for up to {seconds:g} s, tokens wait in memory"
    place: str
    seconds: float


@dataclass(frozen=True)
class FewGpus(Event):
    """More workers are wanted than the machine has GPUs for, and each needs `num_gpus_per_worker`."""

    text: ClassVar[str] = (
        "--workers {num_workers}: this machine has {num_gpus} GPUs, {num_gpus_per_worker} for each worker; the others "
        "never start"
    )
    num_workers: int
    num_gpus: int
    num_gpus_per_worker: int = 1


@dataclass(frozen=True)
class GpusShareModel(Event):
    """A worker has `num_gpus_per_worker` GPUs, the fewest that hold the model and the longest job."""

    text: ClassVar[str] = "model and longest job need more than one GPU: {num_gpus_per_worker} share them"
    num_gpus_per_worker: int


@dataclass(frozen=True)
class DriverStarted(Event):
    """The driver holds the run with claim number `epoch` and starts workers."""

    text: ClassVar[str] = "starting workers: each loads Python, torch and the model, which takes some seconds"
    host: str
    pid: int
    epoch: int


@dataclass(frozen=True)
class WorkerReady(Event):
    """A worker has loaded its model and takes jobs; `seconds` has the times of its start, such as `weights`."""

    text: ClassVar[str] = "worker {worker} is ready"
    worker: str
    host: str
    pid: int
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerStopping(Event):
    """A worker takes no more jobs and returns its own; `reason` is a word for programs."""

    worker: str
    reason: str

    def __str__(self) -> str:
        if self.reason == "node_drained":
            return f"worker {self.worker} stops: its node is about to go"
        return f"worker {self.worker} was told to end from outside"


@dataclass(frozen=True)
class WorkerLost(Event):
    """A worker is lost: `reason` is a word for programs, `message` explains it."""

    text: ClassVar[str] = "worker {worker} is lost: {message}"
    worker: str
    reason: str
    message: str


@dataclass(frozen=True)
class GpuLeftOut(Event):
    """The GPU with UUID `gpu` failed `num_failures` times, the last time with `message`, and gets no more workers."""

    is_error: ClassVar[bool] = True
    text: ClassVar[str] = (
        "GPU {gpu} has failed {num_failures} times and gets no more workers of this run; look after it: {message}"
    )
    gpu: str
    num_failures: int
    message: str


@dataclass(frozen=True)
class RunStopping(Event):
    """The driver was asked to end, and its workers write their checkpoints."""

    text: ClassVar[str] = "stopping: workers write their checkpoints; a second signal ends all at once"


@dataclass(frozen=True)
class DriverAwaited(Event):
    """`status --watch` waits for the run's first driver."""

    text: ClassVar[str] = (
        "waiting for a driver: `swiftbatch submit` starts one in some seconds, or: swiftbatch resume {run}"
    )
    run: str


@dataclass(frozen=True)
class DriverSilent(Event):
    """`status --watch` has had no heartbeat for a while; `updated` is the last one, in seconds since 1970."""

    host: str
    pid: int
    updated: float

    def __str__(self) -> str:
        return f"no word from the driver, process {self.pid} on {self.host}, for {time.time() - self.updated:.0f} s"


@dataclass(frozen=True)
class LimitReached(Event):
    """The run stops at its `limit`, a text for people; its workers write their checkpoints."""

    text: ClassVar[str] = "stopping at {limit}: nothing is lost"
    limit: str


@dataclass(frozen=True)
class ShardWritten(Event):
    """The shard at `path` in the run folder is complete with `num_rows` rows and never changes again."""

    path: str
    num_rows: int

    def __str__(self) -> str:
        return f"shard {printable(self.path)} is there: {counted(self.num_rows, 'row')}"


@dataclass(frozen=True)
class RunEnded(Event):
    """The command ends: the run's state, jobs by state, output files and the limit reached."""

    run: str
    state: str
    jobs: dict[str, int]
    outputs: tuple[str, str]
    limit: str | None = None
    exit_code: int = 0
    num_tokens: int = 0

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        first, run = f"run {self.state}; jobs: {job_counts(self.jobs)}", printable(self.run)
        if self.limit is not None:
            stopped = f"stopped at {printable(self.limit)}"
            return [first, f"{stopped}; to go on, with larger limits or none: swiftbatch resume {run}"]
        if self.state == "interrupted":
            return [first, f"nothing is lost; go on with: swiftbatch resume {run}"]
        again = f"to run failed and cancelled jobs again: swiftbatch resume {run} --retry-failed"
        has_failed = self.jobs.get("failed") or self.jobs.get("cancelled")
        return [first, *([again] if has_failed else []), f"results: {' and '.join(map(printable, self.outputs))}"]


@dataclass(frozen=True)
class WebhookFailed(Event):
    """A message to `receiver` (scheme and host) failed. Only the first failure is reported."""

    text: ClassVar[str] = "webhook {receiver}: not delivered, {reason}; the run goes on"
    is_error: ClassVar[bool] = True
    receiver: str
    reason: str


# Events of a job.


@dataclass(frozen=True)
class JobStarted(Event):
    """A worker has the job; it continues at `num_tokens`, or at its newest checkpoint before that."""

    custom_id: str
    worker: str
    attempt: int
    num_tokens: int


@dataclass(frozen=True)
class JobFinished(Event):
    """The job's result is in the run folder."""

    custom_id: str
    num_tokens: int


@dataclass(frozen=True)
class JobPutBack(Event):
    """The job is pending again and will resume from its checkpoint: `reason` is a word for programs.

    `num_tokens` is its last reported count. With `is_lost` the attempt broke off; otherwise all its tokens are in the
    checkpoint.
    """

    custom_id: str
    reason: str
    num_tokens: int
    is_lost: bool

    def __str__(self) -> str:
        if self.is_lost:
            return f"job {printable(self.custom_id)} goes back, to resume from its checkpoint"
        reason = "its worker's memory was full" if self.reason == "memory_full" else self.reason
        return f"job {printable(self.custom_id)} goes back with its checkpoint ({reason})"


@dataclass(frozen=True)
class JobGivenUp(Event):
    """The job has used all its attempts: its error is in the run folder, `message` says why."""

    text: ClassVar[str] = "job {custom_id} is {message}"
    is_error: ClassVar[bool] = True
    custom_id: str
    message: str


@dataclass(frozen=True)
class JobCancelled(Event):
    """The user cancelled the job."""

    custom_id: str


@dataclass(frozen=True)
class JobsExtended(Event):
    """`extend` made `num_jobs` jobs longer: they continue from `num_tokens` tokens to at most `max_tokens`."""

    num_jobs: int
    num_tokens: int
    max_tokens: int

    def __str__(self) -> str:
        if not self.num_jobs:
            return "nothing new to extend"
        most = f"{self.max_tokens:,} tokens at most"
        return f"{counted(self.num_jobs, 'job')} to go on, {self.num_tokens:,} tokens are there; each has {most}"


@dataclass(frozen=True)
class JobsLongAlready(Event):
    """Jobs named to `extend` that already may have `max_tokens` or more."""

    custom_ids: tuple[str, ...]
    max_tokens: int

    def __str__(self) -> str:
        num_more = len(self.custom_ids) - NUM_REJECTS_SHOWN
        names = [printable(name) for name in self.custom_ids[:NUM_REJECTS_SHOWN]]
        more = [f"and {counted(num_more, 'more job')}"] if num_more > 0 else []
        return f"may have {self.max_tokens:,} tokens already: {', '.join([*names, *more])}"


@dataclass(frozen=True)
class JobNotExtended(Event):
    """`extend` refused a job, the `number`th of `num_refused` (from 1)."""

    is_error: ClassVar[bool] = True
    custom_id: str
    reason: str
    number: int
    num_refused: int

    def __str__(self) -> str:
        if self.number > NUM_REJECTS_SHOWN + 1:
            return ""
        if self.number > NUM_REJECTS_SHOWN:
            return f"and {self.num_refused - NUM_REJECTS_SHOWN} more jobs that are not extended"
        return f"not extended: job {printable(self.custom_id)}: {printable(self.reason)}"


@dataclass(frozen=True)
class LineDamaged(Event):
    """A job's result or error is damaged: the job runs again, and the file at `path` moves to `kept`."""

    text: ClassVar[str] = "{path} is damaged, {problem}: kept as {kept}; a job that has no other result runs again"
    is_error: ClassVar[bool] = True
    path: str
    problem: str
    kept: str
