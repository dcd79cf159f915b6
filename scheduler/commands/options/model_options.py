"""The options of commands that load a model here, and of benchmarks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from swiftbatch.jobs.run.compute_options import AttentionName, Device, Dtype, KVDtype, LinearName, NumRows
from swiftbatch.scheduler.commands.options.option_types import ANY_WHOLE_NUMBER, WholeNumber
from swiftbatch.worker.config import Computation

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import RenderableType

    Options = TypeVar("Options", bound=BaseModel)

Command = TypeVar("Command", bound=Callable[..., Any])

MAX_THREADS = 1024  # more threads than cores are slower, and millions crash
DTYPES, DEVICES = click.Choice(get_args(Dtype)), click.Choice(get_args(Device))
KV_DTYPES = click.Choice(get_args(KVDtype))
KV_DTYPE_HELP = "8-bit keys and values. [default: as --dtype]"
ATTENTIONS, LINEARS = click.Choice(get_args(AttentionName)), click.Choice(get_args(LinearName))
ATTENTION_HELP = "GPU: kernel for prefix attention."
LINEAR_HELP = "GPU: kernel for products; see `doctor`."
ROWS, ROWS_HELP = click.Choice(get_args(NumRows)), "GPU: rows of a forward."
THREAD_COUNT = WholeNumber(1, MAX_THREADS)


def filled(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse an empty string, as from an unset variable. Raises click.BadParameter."""
    if value == "":
        raise click.BadParameter("found an empty text, expected a name; leave the option away for its default")
    return value


def all_of(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    return lambda command: functools.reduce(lambda done, option: option(done), reversed(options), command)


def _or_all_cores(_context: click.Context, _parameter: click.Parameter, value: int | None) -> int:
    return value or len(os.sched_getaffinity(0))


def text_of(purpose: str, *, required: bool = False) -> Callable[[Command], Command]:
    return click.option("--text", type=click.Path(exists=True, path_type=Path), required=required, help=purpose)


MODEL = click.option(
    "--model",
    default=Computation.model,
    callback=filled,
    help="`embedded`, folder, .gguf, or hub id[@REV].",
)
DRAFT_MODEL = click.option(
    "--draft-model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the engine's trained parts. [default: `parts` in the model's folder]",
)
DTYPE = click.option("--dtype", type=DTYPES, default=Computation.dtype)
THREADS = click.option(
    "--threads", "num_threads", type=THREAD_COUNT, callback=_or_all_cores, help="CPU threads. [default: all cores]"
)
COMPUTING = all_of(DTYPE, click.option("--device", type=DEVICES, default=Computation.device), THREADS)
CUDA_KERNELS = all_of(
    click.option("--attention", type=ATTENTIONS, default=Computation.attention, help=ATTENTION_HELP),
    click.option("--linear", type=LINEARS, default=Computation.linear, help=LINEAR_HELP),
)
JSON = click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures."
)
PLOT = click.option(
    "--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="PNG file for the curves."
)
SEED = click.option("--seed", type=ANY_WHOLE_NUMBER, default=Computation.seed)


def checked(model: type[Options], options: dict[str, Any]) -> Options:
    """Validate a benchmark's options. Raises click.UsageError with the field."""
    from pydantic import ValidationError

    from swiftbatch.jobs.input.validation_errors import reasons

    try:
        return model.model_validate(options)
    except ValidationError as error:
        raise click.UsageError(reasons(error, model)) from None


def say(line: str) -> None:
    click.echo(line, err=True)


def show(found: RenderableType) -> None:
    from rich.console import Console

    Console().print(found)
