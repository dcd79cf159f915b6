"""The command `results`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import IO

import click

from swiftbatch.scheduler.commands.exit_codes import tell_of_damage


@click.command()
@click.argument("run_uri", metavar="RUN")
@click.option("--format", "kind", type=click.Choice(["jsonl", "parquet"]), default="jsonl")
@click.option("--output", type=click.Path(dir_okay=False), help="File to write. [default: stdout]")
def results(run_uri: str, kind: str, output: str | None) -> None:
    """Write the results so far, in the order of the job file: OpenAI Batch lines or a Parquet table.

    Damaged results are omitted and named on stderr; the exit code is then 1.

    \b
    Example:
      swiftbatch results my-run --format parquet --output answers.parquet
    """
    from swiftbatch.jobs.run.output import write_table
    from swiftbatch.jobs.run.run import Run

    if kind == "parquet" and output is None and sys.stdout.isatty():
        raise click.UsageError("a Parquet table is not for a terminal; name a file with --output")
    run = Run.open(run_uri)
    # read the run first, so that errors come before the file is made
    if kind == "parquet":
        write = partial(write_table, lines=run.joined_lines())
    else:
        write = partial(_write_all, lines=run.written_lines())
    try:
        with click.open_file(output or "-", "wb") as file:
            write(file)
    except OSError as error:
        if output is None:  # the reader closed the pipe, as `| head` does
            raise
        raise click.FileError(output, error.strerror) from None
    tell_of_damage(run)


def _write_all(file: IO[bytes], lines: Iterator[bytes]) -> None:
    for line in lines:
        file.write(line)
