"""The command `results`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import click

from swiftbatch.scheduler.commands.exit_codes import tell_of_damage
from swiftbatch.scheduler.commands.options.option_types import WholeNumber
from swiftbatch.scheduler.display.progress_line import counted

if TYPE_CHECKING:
    from swiftbatch.jobs.run.output_table import ResultFormat
    from swiftbatch.jobs.run.run import Run

FORMATS = ("jsonl", "parquet", "chat")
PIECE_BYTES = 2**20


def _fields(_ctx: click.Context, _param: click.Parameter, value: str | None) -> list[str] | None:
    """Split a list of names. Raises click.BadParameter."""
    names = None if value is None else [name.strip() for name in value.split(",")]
    if names is not None and (not all(names) or len({*names}) < len(names)):
        raise click.BadParameter(f"found {value!a}, expected names, each once, as in custom_id,text")
    return names


@click.command()
@click.argument("run_uri", metavar="RUN")
@click.option("--format", "kind", type=click.Choice(FORMATS), default="jsonl")
@click.option("--fields", metavar="A,B,...", callback=_fields, help="Only these columns, in this order. [default: all]")
@click.option("--output", type=click.Path(dir_okay=False), help="File to write. [default: stdout]")
@click.option(
    "--head", "num_lines", type=WholeNumber(1, sys.maxsize), metavar="N", help="Only the first N lines. [default: all]"
)
def results(
    run_uri: str, kind: ResultFormat, fields: list[str] | None, output: str | None, num_lines: int | None
) -> None:
    """Write the results so far, in the order of the job file: OpenAI Batch lines or a Parquet table.

    The format `chat` has a line for each choice: the messages and the answer, for fine-tuning. With --fields, JSON
    lines have the columns of the table. Damaged results are omitted and named on stderr; the exit code is then 1.

    \b
    Example:
      swiftbatch results my-run --format parquet --output answers.parquet
      swiftbatch results my-run --format chat --fields custom_id,messages
    """
    from swiftbatch.jobs.run.run import Run

    if kind == "parquet" and output is None and sys.stdout.isatty():
        raise click.UsageError("a Parquet table is not for a terminal; name a file with --output")
    run = Run.open(run_uri)
    try:
        # the run is read first, so that errors come before the file is made
        with _pieces(run, kind, fields, num_lines) as pieces, click.open_file(output or "-", "wb") as file:
            for piece in pieces:
                file.write(piece)
    except OSError as error:
        if output is None:  # the reader closed the pipe, as `| head` does
            raise
        raise click.FileError(output, error.strerror) from None
    tell_of_damage(run)


@contextmanager
def _pieces(run: Run, kind: ResultFormat, fields: list[str] | None, num_lines: int | None) -> Iterator[Iterator[bytes]]:
    """Yield the bytes of all results. Raises UserError for an unknown field."""
    from swiftbatch.jobs.run.output_table import table_file

    if kind == "jsonl" and fields is None:
        yield islice(run.written_lines(), num_lines)
        return
    with table_file(islice(run.ended_lines(), num_lines), kind, fields) as (file, num_left_out):
        if num_left_out:
            told = "without an answer, or with a prompt of token ids"
            click.echo(f"swiftbatch: left out {counted(num_left_out, 'choice')}: {told}", err=True)
        yield iter(lambda: file.read(PIECE_BYTES), b"")
