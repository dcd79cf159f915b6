"""`python -m bench scale`: what a driver costs with so many jobs and workers, on a machine without any worker."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from pydantic import Field, field_validator
from rich.table import Table

from bench.tables import new_table, number
from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.python_processes import environment_of_code, module_command
from swiftbatch.scheduler.commands.options.model_options import JSON, checked, say, show
from swiftbatch.scheduler.commands.options.option_types import ANY_NUMBER, WholeNumber
from swiftbatch.worker.decode_bench import in_a_folder, write_json

JOBS_FILE, RUN, OPTIONS_FILE = "jobs.jsonl", "run", "options.json"
MOST_JOBS, MOST_WORKERS, MOST_SLOTS, MOST_SECONDS = 10_000_000, 100_000, 256, 86_400
MOST_STORE_MS = 10_000


class ScaleOptions(Frozen):
    """A run of `num_jobs`, of which `share_done` are done when it is resumed, and the driver of `num_workers`."""

    num_jobs: int = Field(ge=10, le=MOST_JOBS)
    num_workers: int = Field(ge=1, le=MOST_WORKERS)
    num_slots: int = Field(ge=1, le=MOST_SLOTS)
    num_seconds: float = Field(gt=0, le=MOST_SECONDS)  # simulated ones, with jobs at work
    store_ms: float = Field(default=0.0, ge=0, le=MOST_STORE_MS)  # of a request to the store, simulated; 0: a disk
    share_done: float = Field(default=0.9, ge=0, le=1)
    folder: Path
    json_path: Path | None = None

    _in_a_folder = field_validator("json_path")(in_a_folder)


STAGE_NAMES = ("submit", "drive", "finish", "submit again", "resume", "cancel")
UNMEASURED = "finish"
WORDS = ("river", "lamp", "seven", "green", "walked", "slowly", "over", "the", "hill", "and", "found", "a", "letter")
NUM_WORDS = (10, 90)  # of a prompt
MAX_TOKENS = (16, 4000)
MIB = 2**20


class ScaleError(UserError):
    """A stage can't be measured."""


def run_scale_bench(options: ScaleOptions, report: Callable[[str], None] = lambda line: None) -> list[dict[str, Any]]:
    """Measure all stages, one after the other; `report` gets a line about each. Raises ScaleError."""
    if (options.folder / RUN).exists():
        raise ScaleError(f"--folder {options.folder}: found a run there, expected a folder without one")
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        (options.folder / OPTIONS_FILE).write_text(options.model_dump_json())
        write_jobs(options.folder / JOBS_FILE, options.num_jobs)
    except OSError as error:
        raise ScaleError(
            f"--folder {options.folder}: {error.strerror}; expected a folder that can be written"
        ) from None
    found = []
    for name in STAGE_NAMES:
        report(f"{name}: {options.num_jobs:,} jobs")
        found.append(_measured_apart(name, options.folder / OPTIONS_FILE))
    found = [figures for figures in found if figures["stage"] != UNMEASURED]
    if options.json_path is not None:
        document = {"results": found, "settings": options.model_dump(mode="json", exclude={"json_path", "folder"})}
        write_json(options.json_path, document)
    return found


def write_jobs(path: Path, num_jobs: int) -> None:
    """Write a file of jobs of all lengths, the same one each time."""
    draw = random.Random(7)
    with path.open("w", encoding="utf-8") as file:
        for index in range(num_jobs):
            prompt = " ".join(draw.choices(WORDS, k=draw.randint(*NUM_WORDS)))
            max_tokens = int(MAX_TOKENS[0] * (MAX_TOKENS[1] / MAX_TOKENS[0]) ** draw.random())
            line = {"custom_id": f"request-{index:08d}", "prompt": prompt, "max_tokens": max_tokens}
            file.write(json.dumps(line) + "\n")


def _measured_apart(name: str, options_file: Path) -> dict[str, Any]:
    """A stage in a process of its own, so that none finds what another has read. Raises ScaleError."""
    command = module_command("bench.scale_stages", name, str(options_file))
    process = subprocess.run(command, env=environment_of_code(), capture_output=True, text=True, check=False)
    if process.returncode != 0:
        last = (process.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ScaleError(f"the stage {name!r} ended with exit code {process.returncode}: {last}")
    figures: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return figures


def render(options: ScaleOptions, found: list[dict[str, Any]]) -> Table:
    """The figures of all stages as a table."""
    title = (
        f"{options.num_jobs:,} jobs; {options.num_workers:,} workers of {options.num_slots} slots for "
        f"{options.num_seconds:g} simulated seconds"
    )
    table = new_table(
        title,
        ["stage"],
        ["CPU s", "us/job", "MiB", "core", "ms/report", "reports", "ended", "requests", "turn p99 s", "no beat s"],
    )
    for figures in found:
        seconds = figures["cpu_seconds"]
        per_job = figures.get("us_per_ended", 1e6 * seconds / options.num_jobs)
        table.add_row(
            figures["stage"],
            number(seconds, ".1f"),
            number(per_job, ",.0f"),
            number(figures["peak_bytes"] / MIB, ",.0f"),
            number(figures.get("busy")),
            number(figures.get("ms_per_report"), ".3f"),
            number(figures.get("num_reports"), ",.0f"),
            number(figures.get("num_finished"), ",.0f"),
            number(figures.get("num_requests"), ",.0f"),
            number(figures.get("turn_p99_seconds"), ".3f"),
            number(figures.get("longest_without_beat_seconds"), ".1f"),
        )
    return table


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
      python -m bench scale --jobs 100000 --workers 1000 --folder /dev/shm/scale --json scale.json
    """
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="swiftbatch-scale-") as temporary:
        scale_options = checked(ScaleOptions, options | {"folder": folder or Path(temporary)})
        show(render(scale_options, run_scale_bench(scale_options, say)))
