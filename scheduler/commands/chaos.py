"""The command `chaos`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from swiftbatch.scheduler.commands.options.option_types import DEVICE, MODEL, WholeNumber
from swiftbatch.worker.drafters.catalogue import DEFAULT_ENGINE, ENGINES, PAPER_ENGINES

NOT_PASSED = 1


@click.command()
@click.option("--jobs", "num_jobs", type=WholeNumber(1), default=4, help="Number of jobs.")
@click.option("--tokens", "num_tokens", type=WholeNumber(1), default=1000, help="Tokens of each job, at least.")
@click.option("--kills", "num_kills", type=WholeNumber(0), default=6, help="Number of kills.")
@click.option("--kind", "kinds", multiple=True, metavar="KIND", help="A kind of kills. Repeatable. [default: all]")
@click.option("--seed", type=WholeNumber(0), default=0, help="Seed of the jobs and of the kills.")
@click.option("--workers", "num_workers", type=WholeNumber(1), default=2)
@click.option("--slots", "num_slots", type=WholeNumber(1), default=2, help="Jobs per worker.")
@MODEL
@DEVICE
@click.option("--engine", type=click.Choice(list(ENGINES | PAPER_ENGINES)), default=DEFAULT_ENGINE, metavar="ENGINE")
@click.option("--engine-option", "engine_options", multiple=True, metavar="NAME=VALUE", help="Repeatable.")
@click.option("--checkpoint-tokens", type=WholeNumber(1), default=128)
@click.option("--run", "run_uri", help="New folder for both runs: a path, s3:// or gs://. [default: chaos-TIME]")
@click.option("--address", help="HOST:PORT of a running Ray cluster, whose nodes stay. [default: start one]")
@click.option(
    "--nodes",
    "num_nodes",
    type=WholeNumber(2),
    help="Start so many nodes, each with a network of its own: as root, on Linux.",
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="File for the report.")
def chaos(run_uri: str | None, json_path: Path | None, **options: Any) -> None:
    """Run jobs undisturbed and again while workers, nodes and the driver are killed or stopped; compare every token.

    With --nodes, nodes are also cut off and come back, hang, and leave with notice, and so do the head and the driver.

    \b
    Exit code: 0 all kills were done and all outputs are identical, 1 they were not, 2 wrong usage or a failed run.

    \b
    Example:
      swiftbatch chaos --jobs 12 --tokens 3000 --kills 25 --seed 1 --json chaos.json
    """
    from swiftbatch.scheduler.chaos.chaos_options import ChaosOptions
    from swiftbatch.scheduler.chaos.experiment import run_chaos

    chaos_options = ChaosOptions(run_uri=run_uri or f"chaos-{time.strftime('%Y%m%d-%H%M%S')}", **options)
    report = run_chaos(chaos_options, click.echo)
    for line in report.lines():
        click.echo(line)
    click.echo(f"both runs: {chaos_options.run_uri}")
    if json_path is not None:
        json_path.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    if not report.has_passed:
        click.get_current_context().exit(NOT_PASSED)
