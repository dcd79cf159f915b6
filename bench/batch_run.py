"""A batch as `swiftbatch submit` runs it, in processes of its own, and the figures that its result lines give."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import click
from pydantic import Field, ValidationError, field_validator

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.python_processes import environment_of_code, module_command
from swiftbatch.jobs.run.compute_options import Dtype
from swiftbatch.jobs.run.run import Run
from swiftbatch.metrics.report.attempts import Attempt, attempts_of, parsed_history
from swiftbatch.scheduler.commands.options.model_options import DTYPE, JSON, MODEL, THREADS, all_of
from swiftbatch.scheduler.commands.options.option_types import ANY_NUMBER
from swiftbatch.worker.config import Computation
from swiftbatch.worker.decode_bench import in_a_folder, write_json
from swiftbatch.worker.drafters.catalogue import ENGINES

WORDS = "river lamp seven green walked slowly over the hill and found a letter from her brother who had left in autumn"
NUM_WORDS = 15  # of a prompt
ROOM_FOR_PROMPT = 64  # tokens, whatever the tokenizer
SAMPLING = {"temperature": 1.0, "min_p": 0.1, "ignore_eos": True}
LEAST_TOKENS = 4  # of a job

Figures = dict[str, Any]
Stage = Callable[[Path], Figures]


class BatchError(UserError):
    """A batch can't be measured."""


class BatchOptions(Frozen):
    """A model, and by how much the lengths of the jobs are divided."""

    model: str = Computation.model
    engine: str = Computation.engine
    dtype: Dtype = Computation.dtype
    scale: float = Field(ge=0.1, le=10_000)
    num_threads: int = Field(ge=1)  # of each worker
    json_path: Path | None = None

    _in_a_folder = field_validator("json_path")(in_a_folder)

    def scaled(self, num_tokens: float) -> int:
        """A length of the full batch in the one that is measured."""
        return max(LEAST_TOKENS, round(num_tokens / self.scale))

    def settings(self) -> dict[str, Any]:
        """All that figures depend on, as JSON has it."""
        return self.model_dump(mode="json", exclude={"json_path"})


class StagesFile(Frozen):
    """The JSON file of a batch's stages, by which a later run goes on."""

    stages: dict[str, Figures]
    settings: dict[str, Any]


def write_lines(path: Path, lengths: Iterable[int]) -> None:
    """Write a file of jobs of such lengths, each with a prompt and a seed of its own, the same ones each time."""
    draw, words = random.Random(11), WORDS.split()
    with path.open("w", encoding="utf-8") as file:
        for index, length in enumerate(lengths):
            prompt = " ".join(draw.choices(words, k=NUM_WORDS))
            line = {"custom_id": f"job-{index}", "prompt": prompt, "max_tokens": length, "seed": index}
            file.write(json.dumps(line | SAMPLING) + "\n")


def run_stages(
    options: BatchOptions, lengths: Sequence[int], stages: dict[str, Stage], report: Callable[[str], None]
) -> dict[str, Figures]:
    """Measure all stages, one after the other. Figures that the JSON file has from a run that was stopped are kept.

    The file is whole after every stage. Raises BatchError.
    """
    found = _kept(options.json_path, options.settings())
    with TemporaryDirectory(prefix="swiftbatch-batch-") as folder:
        jobs_file = Path(folder) / "jobs.jsonl"
        write_lines(jobs_file, lengths)
        for name, stage in stages.items():
            if name in found:
                report(f"{name}: kept from {options.json_path}")
                continue
            report(f"{name}: {len(lengths):,} jobs, {sum(lengths):,} tokens")
            found[name] = stage(jobs_file)
            write_figures(options, found)
    return found


def write_figures(options: BatchOptions, found: dict[str, Figures]) -> None:
    """Write the figures of stages with what they were measured with, where a file was named."""
    if options.json_path is not None:
        write_json(options.json_path, StagesFile(stages=found, settings=options.settings()).model_dump())


def _kept(path: Path | None, settings: dict[str, Any]) -> dict[str, Figures]:
    """The figures of stages that were measured with the same settings; none where the file has another form."""
    if path is None:
        return {}
    try:
        found = StagesFile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return {}
    return found.stages if found.settings == settings else {}


@dataclass(frozen=True)
class StartedRun:
    """A `swiftbatch submit` that runs."""

    folder: Path
    process: subprocess.Popen[str]

    @classmethod
    def of(cls, jobs_file: Path, name: str, options: BatchOptions, num_workers: int, *further: str) -> StartedRun:
        """Start a run of these jobs, in a folder beside their file."""
        folder = jobs_file.with_name(name)
        sizes = ["--workers", str(num_workers), "--threads", str(options.num_threads), *further]
        what = ["--model", options.model, "--engine", options.engine, "--dtype", options.dtype, "--device", "cpu"]
        command = module_command("swiftbatch.scheduler.cli", "submit", str(jobs_file), "--run", str(folder))
        process = subprocess.Popen(
            [*command, *what, *sizes],
            env=environment_of_code(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        return cls(folder, process)

    def figures(self) -> Figures:
        """Wait for its end, and measure. Raises BatchError; an interruption ends the run first."""
        try:
            told = self.process.communicate()[1]
        except KeyboardInterrupt:
            self.stop()
            raise
        if self.process.returncode != 0:
            last = (told.strip().splitlines() or ["it said nothing"])[-1]
            raise BatchError(f"the run {self.folder.name!r} ended with exit code {self.process.returncode}: {last}")
        return figures_of(Run.open(str(self.folder)))

    def stop(self) -> None:
        """Have it end in good order, and wait for that. It counts as one signal with the Ctrl-C that both heard."""
        self.process.terminate()
        if self.process.stderr is not None and not self.process.stderr.closed:  # read, for a full pipe would hold it up
            self.process.communicate()


def figures_of(run: Run) -> Figures:
    """Measure a run that has ended, from a worker's first job to the end of all: the starts of workers stay out.

    Where these begin at different times, the mean counts.
    """
    num_tokens, attempts, digests = 0, list[Attempt](), dict[str, str]()
    for record, line in run.output_lines():
        if line is None or line["error"] is not None:
            raise BatchError(f"job {record.job.custom_id} has no result; `swiftbatch doctor` may tell why")
        body = line["response"]["body"]
        num_tokens += body["usage"]["completion_tokens"]
        history = parsed_history(body["metrics"]["attempts"])
        attempts += attempts_of(history, "finished", float(body["created"]), ())
        digests[record.job.custom_id] = body["choices"][0]["token_ids_sha256"]
    starts, ends = _starts_and_ends(attempts)
    seconds, progress = max(ends.values()) - fmean(starts.values()), run.progress()
    return {
        "num_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "seconds_of_workers": {worker: end - starts[worker] for worker, end in sorted(ends.items())},
        "num_preemptions": progress.num_preemptions if progress else {},
        "digests": digests,
    }


def _starts_and_ends(attempts: Iterable[Attempt]) -> tuple[dict[str, float], dict[str, float]]:
    """The moments when each worker began its first job, and ended its last."""
    starts, ends = dict[str, float](), dict[str, float]()
    for attempt in attempts:
        starts[attempt.worker_id] = min(starts.get(attempt.worker_id, attempt.start), attempt.start)
        ends[attempt.worker_id] = max(ends.get(attempt.worker_id, attempt.end), attempt.end)
    return starts, ends


BATCH = all_of(
    MODEL,
    click.option("--engine", type=click.Choice(list(ENGINES)), metavar="ENGINE", default=Computation.engine),
    DTYPE,
    click.option("--scale", type=ANY_NUMBER, default=10.0, show_default=True, help="What lengths are divided by."),
    THREADS,
    JSON,
)
