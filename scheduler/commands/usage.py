"""The command `serve usage`."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from swiftbatch.metrics.report.page_text import amount

if TYPE_CHECKING:
    from swiftbatch.scheduler.serve.batches.team_usage import TeamUsage

COLUMNS = (
    *("month", "key", "num_batches", "num_input_tokens", "num_output_tokens", "num_generated_tokens"),
    *("worker_hours", "cost"),
)
NUM_NAMES = 2  # columns before the numbers


@click.command()
@click.option("--runs", "runs_uri", metavar="RUNS", required=True, help="Folder of the server.")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
def usage(runs_uri: str, as_csv: bool) -> None:
    """Print what each key used in each month: tokens, worker hours, and the cost if there is a price.

    It only reads the folder, also while the server runs. A batch counts in the month in which it was created, in UTC.

    \b
    Example:
      swiftbatch serve usage --runs RUNS --csv
    """
    from swiftbatch.jobs.storage.store import Store
    from swiftbatch.scheduler.serve.batches.team_usage import usage_by_month
    from swiftbatch.scheduler.serve.records.stored_objects import Batches

    used = usage_by_month(Batches(Store(runs_uri), lambda batch: None).all())
    if as_csv:
        rows = ([*group, *_numbers(sums)] for group, sums in used.items())
        csv.writer(sys.stdout, lineterminator="\n").writerows([COLUMNS, *rows])
        return
    for line in _table(used):
        click.echo(line)


def _numbers(used: TeamUsage) -> list[Any]:
    counts = (used.num_batches, used.num_input_tokens, used.num_output_tokens, used.num_generated_tokens)
    return [*counts, round(used.worker_seconds / 3600, 6), None if used.cost is None else round(used.cost, 6)]


def _table(used: dict[tuple[str, str], TeamUsage]) -> list[str]:
    """Return aligned lines; a month with several keys has their sum, too."""
    from swiftbatch.scheduler.serve.batches.team_usage import TeamUsage

    heads = ["month", "key", "batches", "input tokens", "output tokens", "generated", "worker hours", "cost"]
    rows = [heads]
    for month, groups in groupby(used.items(), lambda group: group[0][0]):
        teams = {key or "-": sums for (_, key), sums in groups}
        if len(teams) > 1:
            teams["all keys"] = sum(teams.values(), TeamUsage())
        rows += [[month, key, *_shown(_numbers(sums))] for key, sums in teams.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_aligned(row, widths)).rstrip() for row in rows]


def _shown(numbers: Sequence[Any]) -> list[str]:
    *counts, hours, cost = numbers
    return [*(f"{count:,}" for count in counts), f"{hours:,.4g}", "" if cost is None else amount(cost)]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    cells = list(zip(row, widths, strict=True))
    return [
        *(cell.ljust(width) for cell, width in cells[:NUM_NAMES]),
        *(cell.rjust(width) for cell, width in cells[NUM_NAMES:]),
    ]
