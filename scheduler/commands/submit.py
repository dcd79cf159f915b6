"""The command `submit`."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, get_args

import click

from swiftbatch.jobs.job import JobUrl
from swiftbatch.jobs.json_records import is_utf8
from swiftbatch.jobs.run.run_records import LogprobsMode, SamplingDefaults
from swiftbatch.jobs.sampling_params import MAX_SEED, MIN_SEED, LoopAction, ThinkingEnd
from swiftbatch.scheduler.commands.exit_codes import end, launch_shown, told_to_repeat
from swiftbatch.scheduler.commands.options.launch_options import (
    ENGINE,
    launch_options,
    make_settings,
    run_option,
    shown,
)
from swiftbatch.scheduler.commands.options.option_types import (
    ATTENTION_HELP,
    ATTENTIONS,
    DEVICES,
    DTYPES,
    KV_DTYPE_HELP,
    KV_DTYPES,
    LINEAR_HELP,
    LINEARS,
    ROWS,
    ROWS_HELP,
    THREAD_COUNT,
    GroupedCommand,
    WholeNumber,
    filled,
    options_of,
    utf8,
)
from swiftbatch.worker.config import Computation
from swiftbatch.worker.drafters.catalogue import ENGINES, PAPER_ENGINES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from swiftbatch.jobs.input.parquet_rows import Columns
    from swiftbatch.jobs.input.rejects import Reject
    from swiftbatch.jobs.run.shards import ShardSettings
    from swiftbatch.scheduler.display.display import Display
    from swiftbatch.scheduler.runs.submission import Submission

ENGINE_LINES, PAPER_LINES = (
    [f"  {name:<21} {entry.drafts_from}" for name, entry in group.items()] for group in (ENGINES, PAPER_ENGINES)
)
EPILOG = "\n".join(["\b", "Engines draft from:", *ENGINE_LINES, "Engines as their papers describe them:", *PAPER_LINES])


def _markers(_ctx: click.Context, _param: click.Parameter, value: tuple[str, str] | None) -> tuple[str, str] | None:
    """Check both markers. Raises click.BadParameter."""
    for text in value or ():
        if not text or not is_utf8(text):
            raise click.BadParameter(f"found {text!a}, expected two texts in UTF-8 that are not empty")
    return value


def _team(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Check a team's name. Raises click.BadParameter."""
    from swiftbatch.scheduler.serve.records.api_keys import NAME

    if value is not None and not re.fullmatch(NAME, value):
        raise click.BadParameter(f"found {value!a}, expected up to 64 letters, digits, '.', '_' and '-'")
    return value


def _columns(_ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> Columns:
    from swiftbatch.jobs.input.parquet_rows import ColumnError, Columns

    try:
        return Columns.parse(value)
    except ColumnError as error:
        raise click.BadParameter(str(error)) from None


def _loras(_ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...] | None:
    """Check NAME=PLACE texts. Raises click.BadParameter."""
    from swiftbatch.worker.model.lora import parse_lora

    try:
        for text in value:
            parse_lora(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value or None


def _shards(_ctx: click.Context, _param: click.Parameter, value: str | ShardSettings | None) -> ShardSettings | None:
    from swiftbatch.jobs.run.shards import ShardSettings

    try:
        return ShardSettings.parse(value) if isinstance(value, str) else value
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _clock(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Normalize a time. Raises click.BadParameter."""
    try:
        clock = None if value is None else datetime.fromisoformat(value)
    except ValueError:
        clock = datetime.min
    if clock is not None and clock.tzinfo is None:
        raise click.BadParameter(f"found {value!a}, expected a time with its offset, as 2026-11-28T00:00:00+01:00")
    return None if clock is None else clock.isoformat(timespec="seconds")


token_option = options_of("What decides the tokens; stored in the run")


@click.command(cls=GroupedCommand, epilog=EPILOG)
@click.argument("jobs", type=click.Path(), nargs=-1, required=True)
@run_option(
    "--run",
    "run_uri",
    metavar="RUN",
    callback=utf8,
    help="Folder of the run, also s3://, gs://, az://. [default: jobs.run]",
)
@run_option(
    "--column",
    "columns",
    multiple=True,
    metavar="FIELD=COLUMN",
    callback=_columns,
    help="Read a field from this column, as in prompt=text. Repeatable.",
)
@run_option("--keep-columns", is_flag=True, help="Take unknown columns along to the output.")
@run_option(
    "--output-shards",
    "shards",
    metavar="FORMAT",
    callback=_shards,
    help="Write rows for `datasets` as jobs end: parquet, or jsonl:500.",
)
@run_option(
    "--endpoint", type=click.Choice(get_args(JobUrl)), metavar="URL", help="Reject lines that are for another endpoint."
)
@run_option("--team", metavar="NAME", callback=_team, help="Label of the run's metrics; kept in the run.")
@run_option("--strict", is_flag=True, help="Refuse all files if one line is bad.")
@token_option(
    "--model",
    callback=filled,
    help=f"Folder, .gguf, s3://, or hub id[@REV][:FILE]. [default: {Computation.model}]",
)
@token_option(
    "--lora",
    multiple=True,
    metavar="NAME=PLACE",
    callback=_loras,
    help="Adapter for lines that name it: folder or hub id. Repeatable.",
)
@token_option("--dtype", type=DTYPES, help=f"[default: {Computation.dtype}]")
@token_option("--kv-dtype", type=KV_DTYPES, help=KV_DTYPE_HELP)
@token_option("--device", type=DEVICES, help=f"[default: {Computation.device}]")
@token_option("--attention", type=ATTENTIONS, help=f"{ATTENTION_HELP} [default: {Computation.attention}]")
@token_option("--linear", type=LINEARS, metavar="NAME", help=f"{LINEAR_HELP} [default: {Computation.linear}]")
@token_option("--rows", "num_rows", type=ROWS, help=f"{ROWS_HELP} [default: by jobs, lengths and GPU]")
@token_option(
    "--threads",
    "num_threads",
    type=THREAD_COUNT,
    metavar="N",
    help="CPU threads per worker. [default: cores / workers]",
)
@token_option(
    "--seed",
    type=WholeNumber(MIN_SEED, MAX_SEED),
    metavar="N",
    help=f"Seed for lines without one. [default: {Computation.seed}]",
)
@token_option(
    "--max-tokens",
    type=WholeNumber(1, 2**31 - 1),
    metavar="N",
    help="For lines without it. [default: as many as the model has room for]",
)
@token_option(
    "--loop-guard",
    type=click.Choice(get_args(LoopAction)),
    metavar="ACTION",
    help="On loops: stop, rewind or close. [default: no detection]",
)
@token_option(
    "--thinking-end",
    type=click.Choice(get_args(ThinkingEnd)),
    metavar="ACTION",
    help="On ends in thoughts: stop or close. [default: text ends]",
)
@token_option(
    "--logprobs-mode",
    type=click.Choice(get_args(LogprobsMode)),
    metavar="MODE",
    help=f"raw_logprobs or processed_logprobs. [default: {Computation.logprobs_mode}]",
)
@token_option(
    "--sampling-defaults",
    type=click.Choice(get_args(SamplingDefaults)),
    metavar="SOURCE",
    help=f"For fields that lines leave out: model or openai. [default: {Computation.sampling_defaults}]",
)
@token_option(
    "--lenient-schemas",
    is_flag=True,
    default=None,
    help="Leave schema keywords out that no grammar holds; results name them.",
)
@token_option(
    "--plain-content",
    is_flag=True,
    default=None,
    help="Keep texts that spell control tokens text.",
)
@token_option(
    "--thinking-markers",
    nargs=2,
    metavar="A B",
    callback=_markers,
    help="Texts around thoughts: '<think>' '</think>'. [default: the model's]",
)
@token_option(
    "--clock",
    metavar="TIME",
    callback=_clock,
    help="Time in chat templates. [default: the run's start]",
)
@ENGINE
@launch_options
@told_to_repeat()
def submit(
    jobs: tuple[str, ...],
    run_uri: str | None,
    columns: Columns,
    keep_columns: bool,
    endpoint: JobUrl | None,
    strict: bool,
    may_take_over: bool,
    **options: Any,
) -> None:
    """\b
    Run the jobs of one or more files, and wait. The same files again run the missing jobs.
    JOBS: JSON lines (short or OpenAI Batch) or Parquet: paths, 'a-*.gz', `-`, s3://, gs://, hf://.
    Exit code: 0 all finished, 1 some failed, 2 wrong input, 3 at a limit, 130 interrupted.
    Example:
      swiftbatch submit 'part-*.parquet' --run my-run --workers 2 --column prompt=text
    """
    from swiftbatch.jobs.input.job_files import run_folder_beside
    from swiftbatch.scheduler.display.events import ModelSamplesBy, RunFolderChosen
    from swiftbatch.scheduler.runs.launch import refuse_start
    from swiftbatch.scheduler.runs.submission import submission

    showing, settings = shown(options), make_settings(**options)
    folder = run_folder_beside(jobs) if run_uri is None else run_uri
    columns = replace(columns, keeps_others=keep_columns)
    submitting = submission(jobs, folder, settings, strict, may_take_over, columns, endpoint)
    with showing as display, contextlib.ExitStack() as stack:
        if run_uri is None:
            display.note(RunFolderChosen(folder))
            stack.enter_context(_told_of_run_option())
        refuse_start(folder, settings)
        submitted = stack.enter_context(submitting)
        _tell_rejects(display, submitted.rejects)
        if submitted.sampling_defaults:
            display.note(ModelSamplesBy(submitted.sampling_defaults))
        _tell_lines(display, submitted)
        outcome = launch_shown(submitted.hold, len(submitted.jobs), settings, display)
    end(submitted.run, outcome, len(submitted.rejects), display)


@contextlib.contextmanager
def _told_of_run_option() -> Iterator[None]:
    """Name `--run` in an error of the default folder. Raises StoreError."""
    from swiftbatch.jobs.storage.store import StoreError

    try:
        yield
    except StoreError as error:
        raise StoreError(f"{error}; --run names another folder") from None


def _tell_lines(display: Display, submitted: Submission) -> None:
    from swiftbatch.scheduler.display.events import ColumnsKept, FieldsWithoutEffect, LinesNamed

    if submitted.without_effect:
        display.note(FieldsWithoutEffect(submitted.without_effect))
    if submitted.reader.kept_columns:
        display.note(ColumnsKept(dict(submitted.reader.kept_columns)))
    if submitted.reader.num_named:
        display.note(LinesNamed(submitted.reader.num_named, submitted.reader.example))


def _tell_rejects(display: Display, rejects: Sequence[Reject]) -> None:
    from swiftbatch.scheduler.display.events import LineRejected

    for number, reject in enumerate(rejects, start=1):
        line_number, custom_id, reason = reject.line_number, reject.custom_id, reject.reason
        display.note(LineRejected(line_number, custom_id, reason, number, len(rejects), reject.file))
