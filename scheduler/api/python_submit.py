"""`swiftbatch.submit`: the command `submit` for Python programs and notebooks."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, TypedDict, Unpack

import click
import numpy as np

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.input.job_files import run_folder_beside
from swiftbatch.jobs.job import JobUrl
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import (
    AttentionName,
    Device,
    Dtype,
    KVDtype,
    LinearName,
    LogprobsMode,
    NumRows,
    SamplingDefaults,
)
from swiftbatch.jobs.sampling_params import LoopAction, ThinkingEnd
from swiftbatch.scheduler.api.run_handle import Path, RunHandle
from swiftbatch.scheduler.api.run_process import RunProcess
from swiftbatch.scheduler.api.table_files import write_parquet
from swiftbatch.worker.config import CheckpointKind

NOT_KEYWORDS = {"run", "quiet", "json"}


class SubmitOptions(TypedDict, total=False):
    """The options of `swiftbatch submit --help`, with underscores; None leaves an option away."""

    column: Mapping[str, str] | None  # fields of a job, each with the column that holds it
    keep_columns: bool
    output_shards: str | None
    endpoint: JobUrl | None
    team: str | None
    strict: bool
    model: str | None
    lora: Mapping[str, str] | None  # places of adapters by name
    dtype: Dtype | None
    kv_dtype: KVDtype | None
    device: Device | None
    attention: AttentionName | None
    linear: LinearName | None
    rows: NumRows | None
    threads: int | None
    seed: int | None
    max_tokens: int | None
    loop_guard: LoopAction | None
    thinking_end: ThinkingEnd | None
    logprobs_mode: LogprobsMode | None
    sampling_defaults: SamplingDefaults | None
    lenient_schemas: bool
    plain_content: bool
    thinking_markers: Sequence[str] | None
    clock: str | None
    engine: str | None
    engine_option: Mapping[str, object] | None  # values by name
    takeover: bool
    workers: int
    gpus_per_worker: Literal[1, 2, 4, 8, "auto"]
    slots: int | Literal["auto"]
    draft_model: str | None
    kv_offload: str | None
    kv_memory: float | None
    address: str | None
    max_attempts: int
    worker_timeout: float | None
    price_per_worker_hour: float | None
    deadline: str | None
    max_total_tokens: int | None
    max_worker_hours: float | None
    checkpoint: CheckpointKind
    checkpoint_tokens: int
    checkpoint_seconds: float
    grace_seconds: float
    keep_state: bool
    store_retry_seconds: float
    metrics_port: int | None
    metrics_host: str | None
    metrics_textfile: str | None
    webhook: str | None
    webhook_jobs: bool


Jobs = Path | Iterable[Path] | Iterable[Mapping[str, Any]]


def submit(jobs: Jobs, run: Path | None = None, **options: Unpack[SubmitOptions]) -> RunHandle:
    """Start a run of jobs in a process of its own, and return it while it works.

    `jobs` are a file, several files, dicts of a list or generator, or a table of pandas, polars, Arrow or DuckDB with a
    row for each job. `run` is the run's folder; for one file it is `jobs.run` beside it by default. The same call goes
    on with a run that was stopped. Raises UserError with the words of the command `submit`.
    """
    arguments = arguments_of(options)
    is_table = hasattr(jobs, "__arrow_c_stream__")
    if isinstance(jobs, Mapping) or not (is_table or isinstance(jobs, (str, os.PathLike, Iterable))):
        raise UserError(f"submit(): found {type(jobs).__name__} as jobs, expected files, a list of dicts, or a table")
    if is_table:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "jobs.parquet")
            write_parquet(jobs, path)
            return _started([path], _needed(run), arguments)
    files, others = _files_or_dicts(jobs)
    if not files:
        return _started(["-"], _needed(run), arguments, _lines(others))
    return _started(files, run_folder_beside(tuple(files)) if run is None else _needed(run), arguments)


def _files_or_dicts(jobs: Any) -> tuple[list[str], Iterable[Any]]:
    """Return files, or other jobs if the first one is no path. Raises UserError."""
    if isinstance(jobs, (str, os.PathLike)):
        jobs = [jobs]
    rest = iter(sorted(jobs, key=str) if isinstance(jobs, (set, frozenset)) else jobs)
    for first in rest:
        if not isinstance(first, (str, os.PathLike)):
            return [], chain([first], rest)
        files = [first, *rest]
        if others := [each for each in files if not isinstance(each, (str, os.PathLike))]:
            raise UserError(f"submit(): found {type(others[0]).__name__} among files, expected files alone, or dicts")
        return [os.path.expanduser(os.fspath(each)) for each in files], ()
    raise UserError("submit(): found no jobs, expected at least one")


async def submit_async(jobs: Jobs, run: Path | None = None, **options: Unpack[SubmitOptions]) -> RunHandle:
    """Do what `submit` does, without blocking the event loop."""
    return await asyncio.to_thread(submit, jobs, run, **options)


def _needed(run: Path | None) -> str:
    if not isinstance(run, (str, os.PathLike)):
        raise UserError("submit() of jobs that are not in a file: expected run=FOLDER, the folder of the run")
    return os.path.expanduser(run)


def _started(
    files: Sequence[str], run: str, arguments: Sequence[str], lines: Iterable[bytes] | None = None
) -> RunHandle:
    process = RunProcess([*arguments, f"--run={run}", "--json", "--", *files], lines)
    return RunHandle(Run.open(run), process)


def _lines(jobs: Iterable[Any]) -> Iterator[bytes]:
    """Yield the job lines of dicts. Raises UserError."""
    for number, job in enumerate(jobs, start=1):
        if not isinstance(job, Mapping):
            raise UserError(f"job {number}: found {type(job).__name__}, expected a dict with the fields of a job line")
        try:
            yield json.dumps(dict(job), default=_plain).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise UserError(f"job {number}: {error}, expected values that JSON has") from None


def _plain(value: Any) -> Any:
    """Return a number of numpy as Python's. Raises TypeError."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"found {type(value).__name__}")


def arguments_of(options: Mapping[str, Any]) -> list[str]:
    """Return the command's arguments for keyword arguments. Raises UserError for an unknown one."""
    known = keywords()
    arguments = []
    for name, value in options.items():
        if name not in known:
            raise UserError(f"submit() has no option {name!r}; expected one of {', '.join(known)}")
        arguments += _arguments(known[name], value)
    return arguments


def keywords() -> dict[str, click.Option]:
    """Return the command's options by their keywords."""
    from swiftbatch.scheduler.commands.submit import submit

    options = [option for option in submit.params if isinstance(option, click.Option)]
    named = {option.opts[0].removeprefix("--").replace("-", "_"): option for option in options}
    return {name: option for name, option in named.items() if name not in NOT_KEYWORDS}


def _arguments(option: click.Option, value: Any) -> list[str]:
    name = option.opts[0]
    if value is None or (option.is_flag and not value):
        return []
    if option.is_flag:
        return [name]
    pairs = [f"{field}={_text(each)}" for field, each in value.items()] if isinstance(value, Mapping) else None
    if any("\0" in text for text in pairs or [str(value)]):
        raise UserError(f"option {name[2:]}: found a character NUL, expected text")
    if pairs is not None:
        return [f"{name}={pair}" for pair in pairs]
    if option.nargs == 1:
        return [f"{name}={value}"]
    if isinstance(value, str) or len(value) != option.nargs:
        raise UserError(f"option {name[2:]}: found {value!r}, expected {option.nargs} texts")
    return [name, *map(str, value)]


def _text(value: object) -> str:
    """Return a value as the command takes it: 3,3 for (3, 3)."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
