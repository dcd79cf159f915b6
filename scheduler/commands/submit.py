"""The command `submit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import click

from jobs.repetition import LoopAction
from scheduler.commands.launch_options import launch_options, make_settings, output_mode
from scheduler.commands.launching import end, launch_shown
from scheduler.commands.model_options import (
    ATTENTION_HELP,
    ATTENTIONS,
    DEVICES,
    DTYPES,
    LINEAR_HELP,
    LINEARS,
    THREAD_COUNT,
    filled,
)
from worker.config import Computation
from worker.drafters.catalogue import ENGINES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.input.columns import Columns
    from jobs.input.reader import Reject
    from scheduler.display.display import Display

ENGINE_LINES = (f"  {name:<16} {entry.drafts_from}" for name, entry in ENGINES.items())


def _text(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    """A name that is text: Ray, which keeps the command's words, takes no other, and would say so when all is there."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise click.BadParameter(f"found {value!a}, expected a name in UTF-8") from None
    return value


def _columns(_ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> Columns:
    from jobs.input.columns import ColumnError, Columns

    try:
        return Columns.parse(value)
    except ColumnError as error:
        raise click.BadParameter(str(error)) from None


@click.command(epilog="\n".join(["\b", "Engines draft from:", *ENGINE_LINES]))
@click.argument("jobs", type=click.Path(), nargs=-1, required=True)
@click.option(
    "--run", "run_uri", required=True, callback=_text, help="Folder of the run: a path, s3:// or gs://. Made if absent."
)
@click.option("--model", callback=filled, help=f"`embedded`, a folder, or a hub id. [default: {Computation.model}]")
@click.option(
    "--engine", type=click.Choice(list(ENGINES)), help=f"Changes speed, not output. [default: {Computation.engine}]"
)
@click.option("--dtype", type=DTYPES, help=f"[default: {Computation.dtype}]")
@click.option("--device", type=DEVICES, help=f"[default: {Computation.device}]")
@click.option("--attention", type=ATTENTIONS, help=f"{ATTENTION_HELP} [default: {Computation.attention}]")
@click.option("--linear", type=LINEARS, help=f"{LINEAR_HELP} [default: {Computation.linear}]")
@click.option("--threads", "num_threads", type=THREAD_COUNT, help="CPU threads per worker. [default: cores / workers]")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    help=f"For jobs without a seed of their own. [default: {Computation.seed}]",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1, 2**31 - 1),
    help="For jobs without max_tokens of their own. [default: all that the model's positions leave behind a prompt]",
)
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="FIELD=COLUMN",
    callback=_columns,
    help="The column, or the name in JSON lines, that is a field, as in prompt=text. May be given several times.",
)
@click.option(
    "--loop-guard",
    type=click.Choice(get_args(LoopAction)),
    help="What becomes of an output that is a loop, for jobs without repetition_detection. [default: it goes on]",
)
@click.option("--strict", is_flag=True, help="Refuse all files if one line is bad.")
@launch_options
def submit(
    jobs: tuple[str, ...],
    run_uri: str,
    columns: Columns,
    strict: bool,
    may_take_over: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run the jobs of one file or several and wait for them. The same files again run only what is missing.

    JOBS are files with one JSON object a line: `custom_id`, `prompt` (or `messages`) and sampling fields as
    `max_tokens`, or an OpenAI Batch line; or Parquet files with such columns. Each may be compressed (gzip, zstd), a
    pipe, `-` for standard input, a pattern as 'part-*.jsonl', or behind s3://, gs://, file:// and hf://datasets/.

    \b
    Exit code: 0 all jobs finished, 1 some failed or were rejected, 130 interrupted,
    2 wrong usage or input, or the run had to stop: then `swiftbatch resume` goes on.

    \b
    Example:
      swiftbatch submit jobs.jsonl --run my-run --workers 2
      swiftbatch submit 'part-*.parquet' --run my-run --column prompt=text
    """
    from scheduler.display.display import open_display
    from scheduler.display.events import FieldsWithoutEffect
    from scheduler.runs.submission import submission

    mode, settings = output_mode(quiet, as_json), make_settings(**options)
    submitting = submission(jobs, run_uri, settings, strict, may_take_over, columns)
    with open_display(mode) as display, submitting as submitted:
        _tell_rejects(display, submitted.rejects)
        if submitted.without_effect:
            display.note(FieldsWithoutEffect(submitted.without_effect))
        outcome = launch_shown(submitted.hold, len(submitted.records), settings, display)
    end(submitted.run, outcome, len(submitted.rejects), display)


def _tell_rejects(display: Display, rejects: Sequence[Reject]) -> None:
    from scheduler.display.events import LineRejected

    for number, reject in enumerate(rejects, start=1):
        line_number, custom_id, reason = reject.line_number, reject.custom_id, reject.reason
        display.note(LineRejected(line_number, custom_id, reason, number, len(rejects), reject.file))
