"""Commands around the runs: doctor, train, bench."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from worker.drafters.names import DEFAULT_ENGINE

DTYPE = click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
DEVICE = click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
MODEL = click.option("--model", default="embedded", show_default=True, help="`embedded`, a folder, or a hub id.")
THREADS = click.option("--threads", type=click.IntRange(1), help="CPU threads. [default: all cores]")


@click.command()
@MODEL
@DTYPE
@DEVICE
@THREADS
@click.option("--json", "as_json", is_flag=True, help="One JSON object for programs.")
def doctor(model: str, dtype: str, device: str, threads: int | None, as_json: bool) -> None:
    """Probe whether speculative decoding gives the very same bits on this machine with this model.

    The verdict is `exact`, or `exact up to ties` where rounding differs.

    \b
    Example:
      swiftbatch doctor --model embedded
    """
    from worker.config import EngineConfig
    from worker.doctor import diagnose

    values = {"model": model, "dtype": dtype, "device": device, "num_threads": threads or _num_cores()}
    diagnosis = diagnose(EngineConfig.model_validate(values))
    click.echo(diagnosis.model_dump_json(indent=2) if as_json else diagnosis.summary())


@click.group()
def train() -> None:
    """Train models.

    \b
    Example:
      swiftbatch train target --data books --output my-model
    """


@train.command()
@click.option("--data", type=click.Path(path_type=Path), required=True, help="JSONL files with `text`, or a folder.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder to write.")
def target(data: Path, output: Path) -> None:
    """Train a small target model from scratch, as the embedded one was.

    \b
    Example:
      swiftbatch train target --data books --output my-model
    """
    from worker.training.recipe import EMBEDDED_RECIPE
    from worker.training.target import train_target

    train_target(data, output, EMBEDDED_RECIPE, click.echo)


@click.group()
def bench() -> None:
    """Measure speed.

    \b
    Example:
      swiftbatch bench decode --engines autoregressive,suffix --positions 4096
    """


@bench.command()
@MODEL
@click.option(
    "--engines", default=f"autoregressive,{DEFAULT_ENGINE}", show_default=True, help="Names, comma-separated."
)
@click.option("--positions", default="4096", show_default=True, help="Tokens in the cache, comma-separated.")
@click.option("--tokens", "num_tokens", type=int, default=256, show_default=True, help="To generate at each position.")
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--min-p", type=float, default=0.1, show_default=True)
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--text", type=click.Path(exists=True, path_type=Path), help="What fills the cache. [default: own text]")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures.")
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

    from jobs.reasons import reasons
    from worker.bench.decode import DecodeBenchOptions, run_decode_bench
    from worker.bench.records import render

    names = {"engines": _split(engines), "positions": _split(positions), "num_threads": threads or _num_cores()}
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
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures.")
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

    from jobs.reasons import reasons
    from worker.bench.checkpoints import CheckpointBenchOptions, render, run_checkpoint_bench

    names = {"positions": _split(positions), "num_threads": threads or _num_cores()}
    try:
        bench_options = CheckpointBenchOptions.model_validate(options | names)
    except ValidationError as error:
        raise click.UsageError(reasons(error, CheckpointBenchOptions)) from None
    records = run_checkpoint_bench(bench_options, lambda line: click.echo(line, err=True))
    Console().print(render(records))


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
