"""The options of commands that run jobs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import click

from swiftbatch.scheduler.commands.model_options import all_of, filled
from swiftbatch.scheduler.commands.options.grouping import options_of
from swiftbatch.scheduler.commands.options.limit_options import LIMITS
from swiftbatch.scheduler.commands.options.numbers import Number, WholeNumber
from swiftbatch.scheduler.commands.options.webhook import OUTPUT
from swiftbatch.scheduler.limits import Limits
from swiftbatch.scheduler.runs.settings import STORE_SLACK_SECONDS, WORKER_TIMEOUT, Settings
from swiftbatch.worker.config import CheckpointKind, CheckpointSettings, Computation
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.kernels.sizes import MOST_SLOTS

MAX_SECONDS = 1_000_000_000  # 31 years


class Seconds(Number):
    """A number of seconds that a clock can count: click takes NaN and infinity for numbers in any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not seconds <= MAX_SECONDS:
            self.fail(f"found {value}, expected at most {MAX_SECONDS:,} seconds", param, ctx)
        return seconds


SECONDS = Seconds(0, min_open=True)
COUNT = WholeNumber(1)
MOST_WORKERS = 100_000  # more is a slip, and beyond what Ray can count


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


worker_option, checkpoint_option = map(options_of, ("Workers", "Checkpoints"))

ENGINE = worker_option(
    "--engine",
    type=click.Choice(list(ENGINES)),
    metavar="ENGINE",
    help="Affects speed, never the output. [default: the run's, else auto]",
)
WORKERS = (
    worker_option(
        "--workers",
        "num_workers",
        type=WholeNumber(1, MOST_WORKERS),
        metavar="N",
        default=Settings.num_workers,
        help="Number of worker processes.",
    ),
    worker_option(
        "--slots",
        "num_slots",
        type=CountOrAuto(),
        default=Settings.num_slots,
        show_default=False,
        metavar="N|auto",
        help=f"Jobs at a time per worker. [default: as many as fit, up to {MOST_SLOTS}]",
    ),
    worker_option(
        "--draft-model",
        type=click.Path(exists=True, file_okay=False),
        metavar="DIR",
        help="Folder of trained parts. [default: the run's, else the model's]",
    ),
    worker_option(
        "--kv-offload",
        type=click.Path(),
        callback=filled,
        metavar="DIR",
        help="Keep caches in files (GPU: pinned). [default: the run's, else off]",
    ),
    worker_option("--address", metavar="HOST:PORT", help="Join a running Ray cluster. [default: start one]"),
    worker_option(
        "--max-attempts",
        type=COUNT,
        metavar="N",
        default=Settings.max_attempts,
        help="Attempts without progress until a job is given up.",
    ),
    worker_option(
        "--worker-timeout",
        type=SECONDS,
        metavar="S",
        help=f"Replace a silent worker. [default: {WORKER_TIMEOUT:g}, or store retries + {STORE_SLACK_SECONDS:g}]",
    ),
)
CHECKPOINTS = (
    checkpoint_option(
        "--checkpoint",
        type=click.Choice(get_args(CheckpointKind)),
        default=CheckpointSettings.checkpoint,
        help="`state` also saves caches, to resume in seconds.",
    ),
    checkpoint_option(
        "--checkpoint-tokens",
        type=COUNT,
        metavar="N",
        default=CheckpointSettings.checkpoint_tokens,
        help="New tokens of a job between two checkpoints.",
    ),
    checkpoint_option(
        "--checkpoint-seconds",
        type=SECONDS,
        metavar="S",
        default=CheckpointSettings.checkpoint_seconds,
        help="Interval of token logs; a kill loses no more.",
    ),
    checkpoint_option(
        "--grace-seconds",
        type=Seconds(0),
        metavar="S",
        default=CheckpointSettings.grace_seconds,
        help="Time for checkpoints at SIGTERM, Ctrl-C or limits.",
    ),
    checkpoint_option(
        "--keep-state",
        is_flag=True,
        default=CheckpointSettings.keep_state,
        help="Keep caches of jobs that end at max_tokens, for `extend`.",
    ),
    checkpoint_option(
        "--store-retry-seconds",
        type=Seconds(0),
        metavar="S",
        default=CheckpointSettings.store_retry_seconds,
        help="How long to retry a failing store.",
    ),
)
TAKEOVER = options_of("The run")(
    "--takeover",
    "may_take_over",
    is_flag=True,
    help="Take the run over from a driver that has long been silent.",
)

launch_options = all_of(TAKEOVER, *WORKERS, *LIMITS, *CHECKPOINTS, *OUTPUT)
"""What all commands that run jobs share."""


def make_settings(**options: Any) -> Settings:
    """The values of these options, and of those of `submit` or `resume` alone, by the names of the fields they set."""
    named = {field.name: options.pop(field.name, None) for field in fields(Computation)}
    checkpoints = {field.name: options.pop(field.name) for field in fields(CheckpointSettings)}
    limits = Limits(**{field.name: options.pop(field.name, None) for field in fields(Limits)})
    said = {name: value for name, value in named.items() if value is not None}
    return Settings(said, CheckpointSettings(**checkpoints), limits=limits, **options)
