"""Option types (headings, ASCII numbers, amounts, durations, times), and the options that several commands share."""

from __future__ import annotations

import functools
import os
import re
import time
from bisect import bisect_left
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click
from click.types import FloatParamType, IntParamType

from swiftbatch.jobs.json_records import is_utf8
from swiftbatch.jobs.run.run_records import AttentionName, Device, Dtype, KVDtype, LinearName, NumRows
from swiftbatch.scheduler.driver.run_limits import Deadline, steady_seconds
from swiftbatch.worker.config import Computation

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import RenderableType

    Options = TypeVar("Options", bound=BaseModel)

COLUMN_WIDTH = 27
UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}
AMOUNT = r"[0-9]+(?:\.[0-9]+)?"  # "\d" matches digits of any script
DURATION = re.compile("".join(f"(?:({AMOUNT}){unit})?" for unit in UNITS))
TIME_OF_DAY = re.compile(r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?")
EXPECTED_DEADLINE = (
    "expected a duration as 90m or 1d12h, a time of the day as 06:30, or a date and time as 2030-01-31T06:30"
)

Command = TypeVar("Command", bound=Callable[..., Any])


class GroupedOption(click.Option):
    """An option under a heading; its help omits the range."""

    def __init__(self, *args: Any, group: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.group = group

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


class GroupedCommand(click.Command):
    """A command with options grouped by heading, `--help` last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            row = option.get_help_record(ctx)
            if row is None or isinstance(option, click.Argument):
                continue
            name, text = row
            heading = option.group if isinstance(option, GroupedOption) else [*groups][-1]
            groups.setdefault(heading, []).append((name.ljust(COLUMN_WIDTH), text))
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows, col_max=COLUMN_WIDTH)


def options_of(group: str) -> Callable[..., Callable[[Command], Command]]:
    return functools.partial(click.option, cls=GroupedOption, group=group)


class InOurDigits(click.ParamType[Any]):
    """A mixin that refuses digits other than 0 to 9."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not value.isascii():
            self.fail(f"found {value!a}, expected a number in the digits 0 to 9", param, ctx)
        return super().convert(value, param, ctx)


class WholeNumber(InOurDigits, click.IntRange):
    pass


class Number(InOurDigits, click.FloatRange):
    pass


class _AnyWholeNumber(InOurDigits, IntParamType):
    """A whole number; click's own class would show bounds in `--help`."""


class _AnyNumber(InOurDigits, FloatParamType):
    pass


ANY_WHOLE_NUMBER, ANY_NUMBER = _AnyWholeNumber(), _AnyNumber()


MAX_HOURS = MAX_GIGABYTES = MAX_PRICE = 1_000_000_000
MAX_SECONDS = 1_000_000_000  # 31 years


class When(click.ParamType[Deadline]):
    """A time to stop at, or a duration from now."""

    name = "when"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Deadline:
        try:
            return value if isinstance(value, Deadline) else parse_deadline(value, time.time())
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Amount(Number):
    """A positive amount below `most`; click alone accepts NaN and infinity."""

    def __init__(self, unit: str, most: float, *, min_open: bool = True) -> None:
        """Refuse amounts above `most`, and 0 with `min_open`."""
        super().__init__(0, min_open=min_open)
        self._unit, self._most = unit, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        amount = float(super().convert(value, param, ctx))
        if not amount <= self._most:
            self.fail(f"found {value}, expected at most {self._most:,} {self._unit}", param, ctx)
        return amount


HOURS, GIGABYTES = Amount("hours", MAX_HOURS), Amount("GB", MAX_GIGABYTES)
PRICE = Amount("an hour", MAX_PRICE, min_open=False)
SECONDS, SECONDS_OR_NONE = (Amount("seconds", MAX_SECONDS, min_open=is_open) for is_open in (True, False))


def parse_deadline(text: str, now: float) -> Deadline:
    """Return the time meant; `now` is in seconds since the epoch. Raises ValueError."""
    try:
        if (seconds := _duration(text.strip())) is not None:
            until = datetime.fromtimestamp(now, UTC) + timedelta(seconds=seconds)
            return Deadline(until.timestamp(), steady_seconds() + seconds)
        return Deadline(_moment(text.strip(), now))
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"found {text!a}, {EXPECTED_DEADLINE}") from None


def _duration(text: str) -> float | None:
    if not text or (found := DURATION.fullmatch(text)) is None:
        return None
    amounts = dict(zip(UNITS.values(), found.groups(), strict=True))
    return timedelta(**{unit: float(amount) for unit, amount in amounts.items() if amount}).total_seconds()


def _moment(text: str, now: float) -> float:
    if TIME_OF_DAY.fullmatch(text):
        hour, minute, *rest = map(int, text.split(":"))
        today = datetime.fromtimestamp(now).replace(hour=hour, minute=minute, second=0, microsecond=0)
        days = [today.replace(second=rest[0] if rest else 0) + timedelta(days=days) for days in (0, 1)]
        return min(moment for day in days for moment in _shown(day) if moment > now)
    said = datetime.fromisoformat(text)
    moments = [said.timestamp()] if said.tzinfo else _shown(said)
    return next((moment for moment in moments if moment > now), moments[0])


def _shown(local: datetime) -> list[float]:
    """Return when the local clock shows a time, twice if it is set back."""
    first, second = sorted(local.replace(fold=fold).timestamp() for fold in (0, 1))
    if datetime.fromtimestamp(first) == local:
        return [first] if first == second else [first, second]
    seconds = range(int(first), int(second) + 1)
    return [seconds[bisect_left(seconds, local, key=datetime.fromtimestamp)]]


# Options that several commands share.


MAX_THREADS = 1024  # more threads than cores are slower, and millions crash
DTYPES, DEVICES = click.Choice(get_args(Dtype)), click.Choice(get_args(Device))
KV_DTYPES = click.Choice(get_args(KVDtype))
KV_DTYPE_HELP = "8-bit keys and values. [default: as --dtype]"
ATTENTIONS, LINEARS = click.Choice(get_args(AttentionName)), click.Choice(get_args(LinearName))
ATTENTION_HELP = "GPU: kernel for prefix attention."
LINEAR_HELP = "Products: cublas or triton on GPUs, int8 on CPUs."
ROWS, ROWS_HELP = click.Choice(get_args(NumRows)), "GPU: rows of a forward."
THREAD_COUNT = WholeNumber(1, MAX_THREADS)


def utf8(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse a text that is not UTF-8, because Ray would fail late. Raises click.BadParameter."""
    if value is not None and not is_utf8(value):
        raise click.BadParameter(f"found {value!a}, expected text in UTF-8")
    return value


def filled(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse an empty string, as from an unset variable. Raises click.BadParameter."""
    if value == "":
        raise click.BadParameter("found an empty text, expected a name; leave the option away for its default")
    return value


def all_of(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    return lambda command: functools.reduce(lambda done, option: option(done), reversed(options), command)


MODEL = click.option(
    "--model",
    default=Computation.model,
    callback=filled,
    help="Folder, .gguf, s3://, or hub id[@REV][:FILE].",
)
DRAFT_MODEL = click.option(
    "--draft-model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the engine's trained parts. [default: `parts` in the model's folder]",
)
DTYPE = click.option("--dtype", type=DTYPES, default=Computation.dtype)
THREADS = click.option(
    "--threads",
    "num_threads",
    type=THREAD_COUNT,
    callback=lambda _context, _parameter, value: value or len(os.sched_getaffinity(0)),
    help="CPU threads. [default: all cores]",
)
DEVICE = click.option("--device", type=DEVICES, default=Computation.device)
COMPUTING = all_of(DTYPE, DEVICE, THREADS)
LINEAR = click.option("--linear", type=LINEARS, metavar="NAME", default=Computation.linear, help=LINEAR_HELP)
CUDA_KERNELS = all_of(
    click.option("--attention", type=ATTENTIONS, default=Computation.attention, help=ATTENTION_HELP), LINEAR
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

    from swiftbatch.jobs.json_records import reasons

    try:
        return model.model_validate(options)
    except ValidationError as error:
        raise click.UsageError(reasons(error, model)) from None


def say(line: str) -> None:
    click.echo(line, err=True)


def show(found: RenderableType) -> None:
    from rich.console import Console

    Console().print(found)
