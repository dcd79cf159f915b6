"""The options of commands that run jobs."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_args

import click

from scheduler.commands.model_options import all_of, filled
from scheduler.runs.settings import STORE_SLACK_SECONDS, WORKER_TIMEOUT, Settings
from worker.config import CheckpointKind, CheckpointSettings, Computation
from worker.memory.plan import MOST_SLOTS

if TYPE_CHECKING:
    from scheduler.display.display import OutputMode

MAX_SECONDS = 1_000_000_000  # 31 years


class Seconds(click.FloatRange):
    """A number of seconds that a clock can count: click takes NaN and infinity for numbers in any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not seconds <= MAX_SECONDS:
            self.fail(f"found {value}, expected at most {MAX_SECONDS:,} seconds", param, ctx)
        return seconds


SECONDS = Seconds(0, min_open=True)
COUNT = click.IntRange(1)


class CountOrAuto(click.ParamType[int | None]):
    """A number from 1 on, or `auto`, which is None."""

    name = "auto|integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value == "auto":
            return None
        try:
            return int(COUNT.convert(value, param, ctx))
        except click.BadParameter:
            self.fail(f"found {value}, expected auto, or a whole number from 1 on", param, ctx)


WORKERS = (
    click.option("--workers", "num_workers", type=COUNT, default=Settings.num_workers, help="Worker processes."),
    click.option(
        "--slots",
        "num_slots",
        type=CountOrAuto(),
        default=Settings.num_slots,
        show_default="auto",
        metavar="auto|INTEGER",
        help=f"Jobs at a time per worker; auto: as many as its memory has room for, {MOST_SLOTS} at most.",
    ),
    click.option(
        "--draft-model",
        type=click.Path(exists=True, file_okay=False),
        help="Folder with the engine's trained parts. [default: the run's, else `parts` in the model's]",
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
        type=COUNT,
        default=Settings.max_attempts,
        help="Attempts in a row without progress before a job is given up.",
    ),
    click.option(
        "--worker-timeout",
        type=SECONDS,
        help="Seconds without a report after which a worker is replaced. "
        f"[default: {WORKER_TIMEOUT:g}, or {STORE_SLACK_SECONDS:g} more than store retries]",
    ),
    click.option(
        "--metrics-port",
        type=click.IntRange(0, 65535),
        help="Serve metrics; here the driver's, and at /sd where to find the workers' (0: any port).",
    ),
)
CHECKPOINTS = (
    click.option(
        "--checkpoint",
        type=click.Choice(get_args(CheckpointKind)),
        default=CheckpointSettings.checkpoint,
        help="`state` also keeps the caches: more to write, and a long job resumes in seconds.",
    ),
    click.option(
        "--checkpoint-tokens",
        type=COUNT,
        default=CheckpointSettings.checkpoint_tokens,
        help="New tokens of a job between two checkpoints.",
    ),
    click.option(
        "--checkpoint-seconds",
        type=SECONDS,
        default=CheckpointSettings.checkpoint_seconds,
        help="Work that a killed worker costs at most; longer spares an object store.",
    ),
    click.option(
        "--grace-seconds",
        type=Seconds(0),
        default=CheckpointSettings.grace_seconds,
        help="Time to write checkpoints in after SIGTERM, Ctrl-C or a drain notice.",
    ),
    click.option(
        "--keep-state",
        is_flag=True,
        default=CheckpointSettings.keep_state,
        help="Keep the caches of jobs that ended at their max_tokens: `extend` then goes on at once.",
    ),
    click.option(
        "--store-retry-seconds",
        type=Seconds(0),
        default=CheckpointSettings.store_retry_seconds,
        help="How long a failing store is tried again before the run stops.",
    ),
)
OUTPUT = (
    click.option(
        "--takeover",
        "may_take_over",
        is_flag=True,
        help="Go on although a driver holds the run, if it has not been heard of for a while.",
    ),
    click.option("--quiet", is_flag=True, help="Show only errors, and at the end one line."),
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Show events as JSON, one object a line; scheduler/display/EVENTS.md says which.",
    ),
)

launch_options = all_of(*WORKERS, *CHECKPOINTS, *OUTPUT)
"""What `submit` and `resume` share."""


def output_mode(quiet: bool, as_json: bool) -> OutputMode:
    """How a command shows what it does. Raises click.UsageError."""
    if quiet and as_json:
        raise click.UsageError("--quiet and --json: expected at most one of them")
    return "quiet" if quiet else "json" if as_json else "auto"


def make_settings(**options: Any) -> Settings:
    """The values of these options, and of those of `submit` or `resume` alone, by the names of the fields they set."""
    named = {field.name: options.pop(field.name, None) for field in fields(Computation)}
    checkpoints = {field.name: options.pop(field.name) for field in fields(CheckpointSettings)}
    said = {name: value for name, value in named.items() if value is not None}
    return Settings(said, CheckpointSettings(**checkpoints), **options)
