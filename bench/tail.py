"""`python -m bench tail`: by how much a run of jobs of very different lengths ends later than its work would allow.

The work is measured: as many workers as the run has do all of the jobs each, at the same time and each by itself. What
one of them takes for that, over their number, is the least that the run could take.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import click
from pydantic import Field
from rich.table import Table

from bench.batch_run import BATCH, BatchError, BatchOptions, Figures, Stage, StartedRun, run_stages, write_figures
from bench.tables import new_table, number
from swiftbatch.scheduler.commands.options.model_options import checked, say, show
from swiftbatch.scheduler.commands.options.option_types import WholeNumber

SPREAD = 20.0  # the longest job over the shortest
TOGETHER, ALONE = "together", "alone"


class TailOptions(BatchOptions):
    """Jobs between `longest` / 20 and `longest` tokens, the shorter the more of them."""

    num_jobs: int = Field(ge=2, le=100_000)
    num_workers: int = Field(ge=2, le=1000)
    longest: int = Field(ge=100)


def tail_lengths(options: TailOptions) -> list[int]:
    """Lengths as far apart in their logarithms as each other, shuffled: the ends of the span are among them."""
    steps = [index / (options.num_jobs - 1) for index in range(options.num_jobs)]
    lengths = [options.scaled(options.longest * SPREAD ** (step - 1)) for step in steps]
    random.Random(5).shuffle(lengths)
    return lengths


def run_tail_bench(options: TailOptions, report: Callable[[str], None]) -> dict[str, Figures]:
    """Measure the run, and its work. Raises BatchError."""
    stages: dict[str, Stage] = {
        TOGETHER: lambda jobs: StartedRun.of(jobs, TOGETHER, options, options.num_workers).figures(),
        ALONE: lambda jobs: _alone(jobs, options),
    }
    found = run_stages(options, tail_lengths(options), stages, report)
    bound = found[ALONE]["seconds"] / options.num_workers
    found[TOGETHER]["over_bound"] = found[TOGETHER]["seconds"] / bound
    write_figures(options, found)
    return found


def _alone(jobs: Path, options: TailOptions) -> Figures:
    """All jobs on one worker, as often as there are workers, at the same time: each finds the machine as busy."""
    runs = [StartedRun.of(jobs, f"{ALONE}-{number}", options, 1) for number in range(options.num_workers)]
    try:
        found = [run.figures() for run in runs]
    except (BatchError, KeyboardInterrupt):
        for run in runs:  # all lie in a folder that goes with this process
            run.stop()
        raise
    seconds = fmean(figures["seconds"] for figures in found)
    return found[0] | {"seconds": seconds, "tokens_per_second": found[0]["num_tokens"] / seconds}


def render(options: TailOptions, found: dict[str, Figures]) -> Table:
    """The makespan beside its lower bound, and when each worker's last job ended."""
    title = (
        f"{options.num_jobs} jobs of {options.scaled(options.longest / SPREAD):,} to "
        f"{options.scaled(options.longest):,} tokens (1/{options.scale:g} of full lengths), {options.num_workers} "
        f"workers of {options.num_threads} threads"
    )
    together, seconds = found[TOGETHER], found[ALONE]["seconds"]
    ends = ", ".join(f"{end:.1f}" for end in together["seconds_of_workers"].values())
    table = new_table(title, ["what"], ["seconds"])
    table.add_row("makespan", number(together["seconds"], ".1f"))
    table.add_row("first job to last end, by worker", ends)
    table.add_row("all jobs on one worker", number(seconds, ".1f"))
    table.add_row("the same over the workers", number(seconds / options.num_workers, ".1f"))
    table.add_row("makespan over that", number(together["over_bound"], ".3f"))
    return table


@click.command()
@BATCH
@click.option("--jobs", "num_jobs", type=WholeNumber(2), default=120, show_default=True, help="Jobs of the run.")
@click.option("--workers", "num_workers", type=WholeNumber(2), default=2, show_default=True, help="Workers on CPUs.")
@click.option("--longest", type=WholeNumber(100), default=40_000, show_default=True, help="Tokens of the longest job.")
def tail(**options: Any) -> None:
    """Run jobs whose lengths differ by 20x on two workers, and compare the time with that of their work.

    The work is what one worker takes for all jobs, measured on as many workers at the same time, each by itself. With
    --json the same command goes on after an interruption.

    \b
    Example:
      python -m bench tail --scale 10 --threads 1 --json tail.json
    """
    asked = checked(TailOptions, options)
    show(render(asked, run_tail_bench(asked, say)))
