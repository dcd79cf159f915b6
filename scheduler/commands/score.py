"""The command `score`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from swiftbatch.scheduler.commands.exit_codes import SOME_FAILED
from swiftbatch.scheduler.commands.options.option_types import COMPUTING, KV_DTYPE_HELP, KV_DTYPES, MODEL, WholeNumber

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_TOP_LOGPROBS = 20


@click.command()
@click.argument("source", metavar="RUN|FILE")
@click.option("--logprobs", "num_top", type=WholeNumber(0, MAX_TOP_LOGPROBS), default=0, help="Likeliest tokens, each.")
@MODEL
@COMPUTING
@click.option("--kv-dtype", type=KV_DTYPES, help=KV_DTYPE_HELP)
@click.option("--output", type=click.Path(dir_okay=False), default="-", help="File to write. [default: stdout]")
def score(source: str, num_top: int, output: str, **options: Any) -> None:
    """Write the log-probabilities of texts that exist, with the bits that their generation gives.

    Of a RUN, its results with `logprobs`, on the run's own model. Of a FILE of JSON lines {"custom_id": "a", "prompt":
    "It was", "text": " late"} or {"custom_id": "b", "messages": [...]}, a line with `logprob`, the sum, `is_greedy`
    and `logprobs`. `prompt` and `text` may be token ids. The exit code is 1 if a line has none.

    \b
    Example:
      swiftbatch score requests.jsonl --model Qwen/Qwen3-0.6B --output scores.jsonl
    """
    from swiftbatch.jobs.json_records import dump_line

    if output != "-" and os.path.exists(output) and os.path.exists(source) and os.path.samefile(source, output):
        raise click.UsageError("--output: found the file that is read, expected another one")
    num_bad, lines = 0, _lines(source, num_top, options)
    try:
        with click.open_file(output, "wb") as file:
            for line in lines:
                num_bad += line["error"] is not None
                file.write(dump_line(line))
    except OSError as error:
        if output == "-":  # the reader closed the pipe, as `| head` does
            raise
        raise click.FileError(output, error.strerror) from None
    if num_bad:
        click.echo(f"{num_bad:,} lines have an error in place of log-probabilities", err=True)
        click.get_current_context().exit(SOME_FAILED)


def _lines(source: str, num_top: int, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from swiftbatch.jobs.run.run import MANIFEST, Run
    from swiftbatch.jobs.storage.store import Store
    from swiftbatch.scheduler.runs.scoring import TextScorer, scored_results
    from swiftbatch.worker.config import Computation

    if not Path(source).is_file() and Store(source).exists(MANIFEST):
        context = click.get_current_context()
        said = [name for name in options if context.get_parameter_source(name) == ParameterSource.COMMANDLINE]
        if said:
            raise click.UsageError(f"--{said[0].replace('_', '-')}: expected no such option, since a run has its own")
        return scored_results(Run.open(source), num_top)
    return TextScorer(Computation(**options)).scored_lines(source, num_top)
