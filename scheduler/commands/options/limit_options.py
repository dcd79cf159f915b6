"""The options that limit what a run may take."""

from __future__ import annotations

import time
from typing import Any

import click

from swiftbatch.scheduler.commands.options.grouping import options_of
from swiftbatch.scheduler.commands.options.numbers import Number, WholeNumber
from swiftbatch.scheduler.limits import parse_deadline

MAX_HOURS = 1_000_000_000


class Deadline(click.ParamType[float]):
    """A moment, in seconds since the epoch: durations count from when the command was given."""

    name = "when"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return value if isinstance(value, float) else parse_deadline(value, time.time())
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Hours(Number):
    """A number of hours: click takes NaN and infinity for numbers in any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        hours = float(super().convert(value, param, ctx))
        if not hours <= MAX_HOURS:
            self.fail(f"found {value}, expected at most {MAX_HOURS:,} hours", param, ctx)
        return hours


option = options_of("Limits, at which the run stops in good order with exit code 3")

LIMITS = (
    option("--deadline", type=Deadline(), metavar="WHEN", help="90m or 1d12h from now, 06:30, or 2030-01-31T06:30."),
    option(
        "--max-total-tokens",
        type=WholeNumber(1),
        metavar="N",
        help="Tokens that the run may generate in all, over all its attempts.",
    ),
    option(
        "--max-worker-hours",
        type=Hours(0, min_open=True),
        metavar="HOURS",
        help="Hours that its workers may be held, added up.",
    ),
)
