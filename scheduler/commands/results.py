"""The command `results`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import IO

import click

from swiftbatch.scheduler.commands.exit_codes import tell_of_damage
from swiftbatch.scheduler.commands.options.option_types import WholeNumber


@click.command()
@click.argument("run_uri", metavar="RUN")
@click.option("--format", "kind", type=click.Choice(["jsonl", "parquet"]), default="jsonl")
@click.option("--output", type=click.Path(dir_okay=False), help="File to write. [default: stdout]")
@click.option("--head", "num_lines", type=WholeNumber(1), metavar="N", help="Only the first N lines. [default: all]")
def results(run_uri: str, kind: str, output: str | None, num_lines: int | None) -> None:
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
        write = partial(write_table, lines=islice(run.joined_lines(), num_lines))
    else:
        write = partial(_write_all, lines=islice(run.written_lines(), num_lines))
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
