"""The commands `bench mixed` and `bench tail`, real runs of whole batches, and `bench scale`, a driver by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from swiftbatch.scheduler.commands.options.launch_options import GIGABYTES
from swiftbatch.scheduler.commands.options.model_options import DTYPE, JSON, MODEL, THREADS, all_of, checked, say, show
from swiftbatch.scheduler.commands.options.option_types import ANY_NUMBER, WholeNumber
from swiftbatch.worker.config import Computation
from swiftbatch.worker.drafters.catalogue import ENGINES

BATCH = all_of(
    MODEL,
    click.option("--engine", type=click.Choice(list(ENGINES)), metavar="ENGINE", default=Computation.engine),
    DTYPE,
    click.option("--scale", type=ANY_NUMBER, default=10.0, show_default=True, help="What lengths are divided by."),
    THREADS,
    JSON,
)


@click.command()
@BATCH
@click.option(
    "--kv-memory", type=GIGABYTES, metavar="GB", default=2.0, show_default=True, help="For caches, divided likewise."
)
@click.option(
    "--vllm",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="PYTHON",
    help="A Python that has vLLM, to run the same jobs there.",
)
def mixed(**options: Any) -> None:
    """Run 10 jobs of 40,000 tokens among 90 of 1,000 to 4,000 on one worker on CPUs with 2 GB for caches.

    Then the same jobs in slots of the longest one's length, and in vLLM. The start of a worker, or of vLLM, does not
    count. With --json the same command goes on after an interruption.

    \b
    Example:
      swiftbatch bench mixed --scale 10 --vllm vllm/bin/python --json mixed.json
    """
    from swiftbatch.scheduler.bench.mixed_bench import MixedOptions, render, run_mixed_bench

    asked = checked(MixedOptions, options)
    show(render(asked, run_mixed_bench(asked, say)))


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
      swiftbatch bench tail --scale 10 --threads 1 --json tail.json
    """
    from swiftbatch.scheduler.bench.tail_bench import TailOptions, render, run_tail_bench

    asked = checked(TailOptions, options)
    show(render(asked, run_tail_bench(asked, say)))


@click.command()
@click.option("--jobs", "num_jobs", type=WholeNumber(10), default=10_000, show_default=True, help="Jobs of the run.")
@click.option("--workers", "num_workers", type=WholeNumber(1), default=100, show_default=True, help="Stub workers.")
@click.option("--slots", "num_slots", type=WholeNumber(1), default=8, show_default=True, help="Jobs at a time on each.")
@click.option(
    "--seconds", "num_seconds", type=ANY_NUMBER, default=20.0, show_default=True, help="Simulated time of the driver."
)
@click.option(
    "--store-ms",
    type=ANY_NUMBER,
    default=0.0,
    show_default=True,
    help="Simulated time of a request to the store, 100 in a busy bucket.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the run, which stays; in memory (/dev/shm) it goes sooner. [default: one that is removed]",
)
@JSON
def scale(folder: Path | None, **options: Any) -> None:
    """Measure the driver with stub workers and a simulated clock: CPU seconds and memory, from submit to cancel.

    Nothing is generated, Ray is left out. "core" is the driver's share of one, "turn" a turn of its loop, "no beat"
    the longest time without a heartbeat.

    \b
    Example:
      swiftbatch bench scale --jobs 100000 --workers 1000 --folder /dev/shm/scale --json scale.json
    """
    from tempfile import TemporaryDirectory

    from swiftbatch.scheduler.bench.scale.scale_bench import ScaleOptions, render, run_scale_bench

    with TemporaryDirectory(prefix="swiftbatch-scale-") as temporary:
        scale_options = checked(ScaleOptions, options | {"folder": folder or Path(temporary)})
        show(render(scale_options, run_scale_bench(scale_options, say)))
