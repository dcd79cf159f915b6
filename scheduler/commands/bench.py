"""Commands that measure speed: decode, checkpoints, long; ablations have a file of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from scheduler.commands.ablation import ablation
from scheduler.commands.model_options import DEVICE, DRAFT_MODEL, DTYPE, JSON, MODEL, PLOT, SEED, THREADS, num_cores
from worker.drafters.names import DEFAULT_ENGINE


@click.group()
def bench() -> None:
    """Measure speed.

    \b
    Example:
      swiftbatch bench decode --engines autoregressive,suffix --positions 4096
    """


@bench.command()
@MODEL
@DRAFT_MODEL
@click.option(
    "--engines", default=f"autoregressive,{DEFAULT_ENGINE}", show_default=True, help="Names, comma-separated."
)
@click.option("--positions", default="4096", show_default=True, help="Tokens in the cache, comma-separated.")
@click.option("--tokens", "num_tokens", type=int, default=256, show_default=True, help="To generate at each position.")
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--min-p", type=float, default=0.1, show_default=True)
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True)
@SEED
@click.option("--text", type=click.Path(exists=True, path_type=Path), help="What fills the cache. [default: own text]")
@JSON
@click.option("--against", type=click.Choice(["transformers"]), help="Also time this implementation.")
@DTYPE
@DEVICE
@THREADS
def decode(engines: str, positions: str, threads: int | None, **options: Any) -> None:
    """Let every engine generate the same tokens from the same state, and compare.

    \b
    Example:
      swiftbatch bench decode --engines autoregressive,suffix --positions 4096,100000 --tokens 256 --json bench.json
    """
    from pydantic import ValidationError
    from rich.console import Console

    from jobs.input.reasons import reasons
    from worker.bench.decode.decode import DecodeBenchOptions, run_decode_bench
    from worker.bench.decode.records import render

    names = {"engines": _split(engines), "positions": _split(positions), "num_threads": threads or num_cores()}
    try:
        bench_options = DecodeBenchOptions.model_validate(options | names)
    except ValidationError as error:
        raise click.UsageError(reasons(error, DecodeBenchOptions)) from None
    records = run_decode_bench(bench_options, lambda line: click.echo(line, err=True))
    Console().print(render(records))


@bench.command()
@MODEL
@click.option("--engine", default=DEFAULT_ENGINE, show_default=True)
@click.option("--positions", default="4096", show_default=True, help="Tokens in the cache, comma-separated.")
@click.option("--checkpoint-tokens", type=int, default=1024, show_default=True, help="Tokens between two states.")
@click.option("--rounds", "num_rounds", type=int, default=5, show_default=True, help="Intervals measured each way.")
@click.option("--text", type=click.Path(exists=True, path_type=Path), required=True, help="What fills the cache.")
@JSON
@DTYPE
@DEVICE
@THREADS
def checkpoints(positions: str, threads: int | None, **options: Any) -> None:
    """Measure what writing state costs while a job runs, and what it saves when the job is resumed.

    \b
    Example:
      swiftbatch bench checkpoints --positions 4096,60000 --text book.txt --json checkpoints.json
    """
    from pydantic import ValidationError
    from rich.console import Console

    from jobs.input.reasons import reasons
    from worker.bench.checkpoints.checkpoints import CheckpointBenchOptions, render, run_checkpoint_bench

    names = {"positions": _split(positions), "num_threads": threads or num_cores()}
    try:
        bench_options = CheckpointBenchOptions.model_validate(options | names)
    except ValidationError as error:
        raise click.UsageError(reasons(error, CheckpointBenchOptions)) from None
    records = run_checkpoint_bench(bench_options, lambda line: click.echo(line, err=True))
    Console().print(render(records))


@bench.command()
@MODEL
@DRAFT_MODEL
@click.option("--engine", default=DEFAULT_ENGINE, show_default=True)
@click.option("--tokens", "max_tokens", type=int, default=100_000, show_default=True, help="To generate.")
@click.option("--prefill", type=int, default=4096, show_default=True, help="Tokens of text to go on from.")
@click.option("--every", type=int, default=20_000, show_default=True, help="Tokens between two records.")
@click.option(
    "--plain-every", type=int, default=2500, show_default=True, help="Tokens between two looks at plain decoding."
)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--min-p", type=float, default=0.1, show_default=True)
@click.option("--eta", type=float, default=0.0, show_default=True)
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True)
@click.option("--penalty-window", type=int, default=1024, show_default=True)
@SEED
@click.option("--text", type=click.Path(exists=True, path_type=Path), help="What is read first. [default: own text]")
@JSON
@PLOT
@DTYPE
@DEVICE
@THREADS
def long(threads: int | None, **options: Any) -> None:
    """Generate one long text, and compare with plain decoding at the same positions on the way.

    Alpha is accepted tokens over the depth of what was drafted. JSON and plot are written at every record.

    \b
    Example:
      swiftbatch bench long --engine tokenswift --tokens 100000 --prefill 4096 --json long.json --plot long.png
    """
    from pydantic import ValidationError
    from rich.console import Console

    from jobs.input.reasons import reasons
    from jobs.sampling import SamplingParams
    from worker.bench.long.long import LongBenchOptions, run_long_bench
    from worker.bench.long.table import render

    sampling = {name: options.pop(name) for name in SamplingParams.model_fields.keys() & options.keys()}
    fields = {"sampling": sampling | {"ignore_eos": True}, "num_threads": threads or num_cores()}
    try:
        bench_options = LongBenchOptions.model_validate(options | fields)
    except ValidationError as error:
        raise click.UsageError(reasons(error, LongBenchOptions)) from None
    Console().print(render(run_long_bench(bench_options, lambda line: click.echo(line, err=True))))


bench.add_command(ablation)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
