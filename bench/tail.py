"""Delay of a run's end beyond what its work allows, with very different job lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from bench.batch_run import BatchError, BatchOptions, StartedRun, jobs_file_of
from bench.tables import Record, only

SPREAD = 20.0  # longest over shortest job
COLUMNS = ("way", "num_tokens", "seconds", "tokens_per_second", "over_bound")


class Options(BatchOptions):
    """Options; jobs between `longest` / 20 and `longest` tokens, more short ones."""

    num_jobs: int = 120
    num_workers: int = 2
    longest: int = 40_000


def tail_lengths(options: Options) -> list[int]:
    """Return shuffled lengths, evenly spaced by logarithm."""
    steps = [index / (options.num_jobs - 1) for index in range(options.num_jobs)]
    lengths = [options.scaled(options.longest * SPREAD ** (step - 1)) for step in steps]
    random.Random(5).shuffle(lengths)
    return lengths


def run(options: Options) -> Iterator[Record]:
    """Run jobs whose lengths differ by 20x on two workers, and compare the time with that of their work.

    The work is what one worker takes for all jobs, measured on as many workers at the same time, each by itself. All
    lengths are divided by --scale. `over_bound` is the time over the least that it could be.

    \b
    Example:
      python -m bench tail --scale 10 --threads 1 --json tail.jsonl
    """
    with jobs_file_of(tail_lengths(options)) as jobs:
        together = StartedRun.of(jobs, "together", options, options.num_workers).figures()
        yield {"way": "together"} | together
        alone = _alone(jobs, options)
        bound = alone["seconds"] / options.num_workers
        yield {"way": "alone"} | alone | {"over_bound": together["seconds"] / bound}


def _alone(jobs: Path, options: Options) -> Record:
    """Run all jobs on one worker, as often at once as there are workers."""
    runs = [StartedRun.of(jobs, f"alone-{number}", options, 1) for number in range(options.num_workers)]
    try:
        found = [run.figures() for run in runs]
    except (BatchError, KeyboardInterrupt):
        for run in runs:  # their folder is deleted with this process
            run.stop()
        raise
    seconds = fmean(figures["seconds"] for figures in found)
    return found[0] | {"seconds": seconds, "tokens_per_second": found[0]["num_tokens"] / seconds}


def shown(records: list[Record], options: Options) -> list[Record]:
    return only(records, COLUMNS)
