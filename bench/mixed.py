"""`python -m bench mixed`: a few long jobs among many short ones, on a worker with little memory for caches.

Beside it the same jobs in slots of the longest one's length, as memory is shared out where caches don't grow, and in
vLLM with the same memory.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from pydantic import Field
from rich.table import Table

from bench.batch_run import BATCH, ROOM_FOR_PROMPT, BatchError, BatchOptions, Figures, Stage, StartedRun, run_stages
from bench.tables import new_table, number
from swiftbatch.scheduler.commands.options.model_options import checked, say, show
from swiftbatch.scheduler.commands.options.option_types import GIGABYTES
from swiftbatch.worker.kv.kv_capacity import GB, bytes_per_position
from swiftbatch.worker.model.model_files import CONFIG_FILES, locate_model, model_folder, read_config

NUM_LONG, LONG = 10, 40_000
NUM_SHORT, SHORT = 90, (1000, 4000)
PAGES, SLOTS, VLLM = "pages", "slots", "vllm"
IN_VLLM = Path(__file__).with_name("vllm_generation.py")  # which no Python of ours imports


class MixedOptions(BatchOptions):
    """The memory of the worker is divided as the lengths are."""

    kv_memory: float = Field(gt=0)  # GB at full lengths
    vllm: Path | None = None  # a Python that has vLLM; None to leave it out


def mixed_lengths(options: MixedOptions) -> list[int]:
    """The lengths in the order of the lines, long ones anywhere between."""
    draw = random.Random(3)
    lengths = [LONG] * NUM_LONG + [draw.randint(*SHORT) for _ in range(NUM_SHORT)]
    draw.shuffle(lengths)
    return [options.scaled(length) for length in lengths]


def run_mixed_bench(options: MixedOptions, report: Callable[[str], None]) -> dict[str, Figures]:
    """Measure all ways. Raises BatchError, also where the runs' tokens differ."""
    lengths = mixed_lengths(options)
    memory = options.kv_memory / options.scale
    num_slots = _slots_of(options, memory, max(lengths))
    stages: dict[str, Stage] = {
        PAGES: lambda jobs: StartedRun.of(jobs, PAGES, options, 1, "--kv-memory", str(memory)).figures(),
        SLOTS: lambda jobs: StartedRun.of(jobs, SLOTS, options, 1, "--slots", str(num_slots)).figures(),
    }
    if (python := options.vllm) is not None:
        stages[VLLM] = lambda jobs: _in_vllm(python, jobs, options, memory, max(lengths))
    found = run_stages(options, lengths, stages, report)
    if found[PAGES]["digests"] != found[SLOTS]["digests"]:
        raise BatchError("the two runs have other tokens: they were to be the same, `swiftbatch doctor` may tell why")
    return found


def _slots_of(options: MixedOptions, memory: float, longest: int) -> int:
    """The slots of the longest job that fit, one at least. Raises BatchError."""
    config = read_config(options.model, model_folder(options.model, CONFIG_FILES))
    num_bytes = bytes_per_position(config, options.dtype)
    if num_bytes is None:
        raise BatchError(f"--model {options.model}: its config does not say what a position of its caches takes")
    return max(1, int(memory * GB / num_bytes) // (longest + ROOM_FOR_PROMPT))


def _in_vllm(python: Path, jobs: Path, options: MixedOptions, memory: float, longest: int) -> Figures:
    """The same jobs in vLLM, from the first to the last, its start left out. Raises BatchError."""
    cores = sorted(os.sched_getaffinity(0))[: options.num_threads]
    found = jobs.with_name("vllm.json")
    asked = {
        "jobs": str(jobs),
        "found": str(found),
        "model": str(locate_model(options.model).path),
        "dtype": options.dtype,
        "max_model_len": longest + ROOM_FOR_PROMPT,
        "kv_cache_memory_bytes": int(memory * GB),
    }
    threads = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "OMP_NUM_THREADS": str(len(cores))}
    process = subprocess.run(
        [str(python), "-P", str(IN_VLLM), json.dumps(asked)],
        env=os.environ | threads | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        last = (process.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BatchError(f"--vllm {python}: it ended with exit code {process.returncode}: {last}")
    figures: Figures = json.loads(found.read_text(encoding="utf-8"))
    return figures


def render(options: MixedOptions, found: dict[str, Figures]) -> Table:
    """The figures of all ways, and how much faster pages are than each."""
    title = (
        f"{NUM_LONG} jobs of {options.scaled(LONG):,} tokens among {NUM_SHORT} of {options.scaled(SHORT[0]):,} to "
        f"{options.scaled(SHORT[1]):,} (1/{options.scale:g} of full lengths), one worker of {options.num_threads} "
        f"threads with {options.kv_memory / options.scale:g} GB for caches"
    )
    table = new_table(title, ["way"], ["tokens", "seconds", "tokens/s", "pages are", "preemptions"])
    for name, figures in found.items():
        speed = figures["tokens_per_second"]
        table.add_row(
            name,
            f"{figures['num_tokens']:,}",
            number(figures["seconds"], ".1f"),
            number(speed, ",.0f"),
            f"{found[PAGES]['tokens_per_second'] / speed:.2f}x",
            str(sum(figures.get("num_preemptions", {}).values())),
        )
    return table


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
      python -m bench mixed --scale 10 --vllm vllm/bin/python --json mixed.json
    """
    asked = checked(MixedOptions, options)
    show(render(asked, run_mixed_bench(asked, say)))
