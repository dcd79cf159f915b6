"""The command `bench decode`; the other benchmarks are in a checkout: `python -m bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from swiftbatch.jobs import sampling_params
from swiftbatch.scheduler.commands.options.option_types import (
    ANY_NUMBER,
    ANY_WHOLE_NUMBER,
    COMPUTING,
    DRAFT_MODEL,
    JSON,
    LINEAR,
    MODEL,
    SEED,
    checked,
    say,
    show,
)
from swiftbatch.worker.config import Computation


def split(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


TEMPERATURE = click.option("--temperature", type=ANY_NUMBER, default=0.0)
MIN_P = click.option("--min-p", type=ANY_NUMBER, default=0.1)
REPETITION_PENALTY = click.option("--repetition-penalty", type=ANY_NUMBER, default=sampling_params.REPETITION_PENALTY)
CACHED_TEXT = click.option(
    "--text",
    type=click.Path(exists=True, path_type=Path),
    help="Text that fills the cache. [default: the model's own]",
)
POSITIONS = click.option(
    "--positions", default="4096", callback=split, help="Numbers of tokens in the cache, comma-separated."
)


@click.group()
def bench() -> None:
    """Measure speed; `python -m bench` in a checkout has more.

    \b
    Example:
      swiftbatch bench decode --engines autoregressive,suffix --positions 4096
    """


@bench.command()
@MODEL
@DRAFT_MODEL
@click.option(
    "--engines", default=f"autoregressive,{Computation.engine}", callback=split, help="Engines, comma-separated."
)
@click.option(
    "--engine-option",
    "engine_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="For all of them that have it. Repeatable.",
)
@POSITIONS
@click.option("--tokens", "num_tokens", type=ANY_WHOLE_NUMBER, default=256, help="Tokens to generate at each position.")
@TEMPERATURE
@MIN_P
@REPETITION_PENALTY
@SEED
@CACHED_TEXT
@JSON
@click.option("--against", type=click.Choice(["transformers"]), help="Also time this implementation.")
@COMPUTING
@LINEAR
def decode(**options: Any) -> None:
    """Compare engines: each generates the same tokens from the same state.

    \b
    Example:
      swiftbatch bench decode --engines autoregressive,suffix --positions 4096,100000 --tokens 256 --json bench.json
    """
    from swiftbatch.worker.decode_bench import DecodeBenchOptions, render, run_decode_bench

    show(render(run_decode_bench(checked(DecodeBenchOptions, options), say)))
