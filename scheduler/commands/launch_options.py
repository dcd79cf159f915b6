"""The options of commands that run jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from scheduler.commands.model_options import filled

if TYPE_CHECKING:
    from scheduler.display.display import OutputMode
    from scheduler.runs.launch import LaunchOptions

Command = TypeVar("Command", bound=Callable[..., Any])

MAX_SECONDS = 1_000_000_000  # 31 years


class Seconds(click.FloatRange):
    """A number of seconds that a clock can count: click takes NaN and infinity for numbers in any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not seconds <= MAX_SECONDS:
            self.fail(f"found {value}, expected at most {MAX_SECONDS:,} seconds", param, ctx)
        return seconds


SECONDS = Seconds(0, min_open=True)

WORKERS = [
    click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Worker processes."),
    click.option("--slots", type=click.IntRange(1), default=1, show_default=True, help="Jobs at a time per worker."),
    click.option(
        "--draft-model",
        type=click.Path(exists=True, file_okay=False),
        help="Folder with the engine's trained parts. [default: the run's, else beside the model's weights]",
    ),
    click.option(
        "--kv-offload",
        type=click.Path(),
        callback=filled,
        metavar="DIR",
        help="Keep caches in files there (GPU: in pinned memory), not on the device. [default: the run's, else off]",
    ),
    click.option("--address", help="A running Ray cluster, as HOST:PORT. [default: an embedded Ray]"),
    click.option(
        "--max-attempts",
        type=click.IntRange(1),
        default=5,
        show_default=True,
        help="Attempts in a row without progress before a job is given up.",
    ),
    click.option(
        "--worker-timeout",
        type=SECONDS,
        help="Seconds without a report after which a worker is replaced. [default: 120, or 30 more than store retries]",
    ),
    click.option(
        "--metrics-port",
        type=click.IntRange(0, 65535),
        help="Serve metrics; here the driver's, and at /sd where to find the workers' (0: any port).",
    ),
]
CHECKPOINTS = [
    click.option(
        "--checkpoint",
        type=click.Choice(["tokens", "state"]),
        default="state",
        show_default=True,
        help="`state` also keeps the caches: more to write, and a long job resumes in seconds.",
    ),
    click.option(
        "--checkpoint-tokens",
        type=click.IntRange(1),
        default=1024,
        show_default=True,
        help="New tokens of a job between two checkpoints.",
    ),
    click.option(
        "--checkpoint-seconds",
        type=SECONDS,
        default=5.0,
        show_default=True,
        help="Work that a killed worker costs at most; longer spares an object store.",
    ),
    click.option(
        "--grace-seconds",
        type=Seconds(0),
        default=20.0,
        show_default=True,
        help="Time to write checkpoints in after SIGTERM, Ctrl-C or a drain notice.",
    ),
]
RUN_FOLDER = [
    click.option(
        "--store-retry-seconds",
        type=Seconds(0),
        default=120.0,
        show_default=True,
        help="How long a failing store is tried again before the run stops.",
    ),
    click.option(
        "--takeover",
        "may_take_over",
        is_flag=True,
        help="Go on although a driver holds the run, if it has not been heard of for a while.",
    ),
]
OUTPUT = [
    click.option("--quiet", is_flag=True, help="Show only errors, and at the end one line."),
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Show events as JSON, one object a line; scheduler/display/EVENTS.md says which.",
    ),
]


def launch_options(command: Command) -> Command:
    """Add the options that submit and resume share."""
    for option in reversed([*WORKERS, *CHECKPOINTS, *RUN_FOLDER, *OUTPUT]):
        command = option(command)
    return command


def output_mode(quiet: bool, as_json: bool) -> OutputMode:
    """How a command shows what it does. Raises click.UsageError."""
    if quiet and as_json:
        raise click.UsageError("--quiet and --json: expected at most one of them")
    return "quiet" if quiet else "json" if as_json else "auto"


def make_launch_options(workers: int, slots: int, **options: Any) -> LaunchOptions:
    """The values of these options as `launch` takes them."""
    from scheduler.runs.launch import LaunchOptions

    return LaunchOptions(num_workers=workers, num_slots=slots, **options)
