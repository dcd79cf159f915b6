"""The options of commands that run jobs: workers, checkpoints, limits, output, metrics, webhooks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_args

import click

from swiftbatch.scheduler.commands.options.model_options import all_of, filled
from swiftbatch.scheduler.commands.options.option_types import Command, Number, WholeNumber, options_of
from swiftbatch.scheduler.driver.run_limits import Deadline, Limits, parse_deadline
from swiftbatch.scheduler.driver.worker_fleet import STORE_SLACK_SECONDS, WORKER_TIMEOUT
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.worker.config import CheckpointKind, CheckpointSettings, Computation
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.kernels.kernel_sizes import MOST_SLOTS, ROW_CHOICES

if TYPE_CHECKING:
    from swiftbatch.scheduler.display.display import Display, OutputMode
    from swiftbatch.scheduler.display.webhooks import Receiver


def receiver_of(_context: click.Context, _parameter: click.Parameter, value: str | Receiver | None) -> Receiver | None:
    if value is None:
        return None
    from swiftbatch.scheduler.display.webhooks import SECRET_VARIABLE, Receiver, ReceiverError

    try:
        return Receiver.parse(value, os.environ.get(SECRET_VARIABLE)) if isinstance(value, str) else value
    except ReceiverError as error:
        raise click.BadParameter(str(error)) from None


output_option = options_of("Output and notifications")

OUTPUT = (
    output_option("--quiet", is_flag=True, help="Only print errors, and one line at the end."),
    output_option(
        "--json", "as_json", is_flag=True, help="Print events as JSON lines: see scheduler/display/EVENTS.md."
    ),
    output_option(
        "--metrics-port",
        type=WholeNumber(0, 65535),
        metavar="PORT",
        help="Serve metrics, and the workers' addresses at /sd (0: any port).",
    ),
    output_option(
        "--metrics-host",
        metavar="ADDRESS",
        help="Serve them here. [default: 127.0.0.1; on a cluster 0.0.0.0]",
    ),
    output_option(
        "--webhook", metavar="URL", callback=receiver_of, help="Post a message when the run ends: see docs/watching.md."
    ),
    output_option("--webhook-jobs", is_flag=True, help="Post a message when each job ends, too."),
)


def shown(options: dict[str, Any]) -> contextlib.AbstractContextManager[Display]:
    """The display of a command, by its options, which are taken out of them. Raises click.UsageError."""
    quiet, as_json = options.pop("quiet"), options.pop("as_json")
    receiver, with_jobs = options.pop("webhook"), options.pop("webhook_jobs")
    if quiet and as_json:
        raise click.UsageError("--quiet and --json: expected at most one of them")
    if with_jobs and receiver is None:
        raise click.UsageError("--webhook-jobs: expected --webhook with it, which says where to")
    return _opened("quiet" if quiet else "json" if as_json else "auto", receiver, with_jobs)


@contextlib.contextmanager
def _opened(mode: OutputMode, receiver: Receiver | None, with_jobs: bool) -> Iterator[Display]:
    from swiftbatch.scheduler.display.display import open_display

    with open_display(mode) as display:
        if receiver is None:
            yield display
            return
        from swiftbatch.scheduler.display.webhooks import posting

        with posting(display, receiver, with_jobs) as posting_display:
            yield posting_display


# The options of commands that run jobs.


MAX_HOURS = 1_000_000_000

MAX_GIGABYTES = 1_000_000_000
MAX_SECONDS = 1_000_000_000  # 31 years


class When(click.ParamType[Deadline]):
    """A moment to stop at: durations count from when the command was given."""

    name = "when"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Deadline:
        try:
            return value if isinstance(value, Deadline) else parse_deadline(value, time.time())
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Amount(Number):
    """A number of some unit within what can be counted: click takes NaN and infinity for numbers in any range."""

    def __init__(self, unit: str, most: float, *, min_open: bool = True) -> None:
        """`most` is refused beyond, and 0 with `min_open`."""
        super().__init__(0, min_open=min_open)
        self._unit, self._most = unit, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        amount = float(super().convert(value, param, ctx))
        if not amount <= self._most:
            self.fail(f"found {value}, expected at most {self._most:,} {self._unit}", param, ctx)
        return amount


HOURS, GIGABYTES = Amount("hours", MAX_HOURS), Amount("GB", MAX_GIGABYTES)
SECONDS, SECONDS_OR_NONE = (Amount("seconds", MAX_SECONDS, min_open=is_open) for is_open in (True, False))

limit_option = options_of("Limits, at which the run stops with exit code 3 and loses nothing")

LIMITS = (
    limit_option(
        "--deadline",
        type=When(),
        metavar="WHEN",
        help="Stop then: 90m or 1d12h from now, 06:30, or 2030-01-31T06:30.",
    ),
    limit_option(
        "--max-total-tokens",
        type=WholeNumber(1),
        metavar="N",
        help="Tokens generated by the run, over all its attempts.",
    ),
    limit_option(
        "--max-worker-hours",
        type=HOURS,
        metavar="HOURS",
        help="Hours of all its workers, added up.",
    ),
)


COUNT = WholeNumber(1)
MAX_WORKERS = 100_000  # more is a slip, and beyond what Ray can count


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
        type=WholeNumber(1, MAX_WORKERS),
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
        help=f"Jobs on each worker. [default: all that fit, up to {MOST_SLOTS}, GPUs {ROW_CHOICES[-1]}]",
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
    worker_option(
        "--kv-memory",
        type=GIGABYTES,
        metavar="GB",
        help="CPU: memory for caches of a worker. [default: most of it]",
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
        type=SECONDS_OR_NONE,
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
        type=SECONDS_OR_NONE,
        metavar="S",
        default=CheckpointSettings.store_retry_seconds,
        help="How long to retry a failing store.",
    ),
)
run_option = options_of("The run")


def runs_options(folder: str, command: str) -> Callable[[Command], Command]:
    """The options of a command that holds a `folder` of runs for itself."""
    return all_of(
        run_option("--runs", "runs_uri", metavar="RUNS", required=True, help=f"{folder}: a path, s3:// or gs://."),
        run_option(
            "--if-busy",
            type=click.Choice(["refuse", "wait"]),
            default="refuse",
            help=f"If another `{command}` uses the folder.",
        ),
    )


TAKEOVER = run_option(
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
