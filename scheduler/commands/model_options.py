"""The options of commands that load a model in this process, and of those that measure."""

from __future__ import annotations

import os
from pathlib import Path

import click

MAX_THREADS = 1024  # more than cores are slower, and millions end the process


def filled(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """An option's value, if it is no empty string, as of a variable that is not set. Raises click.BadParameter."""
    if value == "":
        raise click.BadParameter("found an empty text, expected a name; leave the option away for its default")
    return value


DTYPE = click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
DEVICE = click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
MODEL = click.option(
    "--model", default="embedded", callback=filled, show_default=True, help="`embedded`, a folder, or a hub id."
)
DRAFT_MODEL = click.option(
    "--draft-model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with the engine's trained parts. [default: beside the model's weights]",
)
THREADS = click.option("--threads", type=click.IntRange(1, MAX_THREADS), help="CPU threads. [default: all cores]")

JSON = click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures."
)
PLOT = click.option(
    "--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="PNG file for the curves."
)
SEED = click.option("--seed", type=int, default=0, show_default=True)


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))
