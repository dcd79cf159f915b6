"""Runs a batch with `swiftbatch submit` and measures it."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from bench.options import JSONOptions
from bench.tables import Record
from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.python_processes import environment_of_code, module_command
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import Dtype
from swiftbatch.metrics.report.attempts import Attempt, attempts_of, parsed_history
from swiftbatch.worker.config import Computation

WORDS = "river lamp seven green walked slowly over the hill and found a letter from her brother who had left in autumn"
NUM_WORDS = 15  # per prompt
ROOM_FOR_PROMPT = 64  # tokens, with any tokenizer
SAMPLING = {"temperature": 1.0, "min_p": 0.1, "ignore_eos": True}
LEAST_TOKENS = 4  # tokens per job


class BatchError(UserError):
    pass


class BatchOptions(JSONOptions):
    """The model, and the divisor of job lengths."""

    model: str = Computation.model
    engine: str = Computation.engine
    dtype: Dtype = Computation.dtype
    scale: float = 10.0
    num_threads: int = Computation.num_threads  # per worker

    def scaled(self, num_tokens: float) -> int:
        return max(LEAST_TOKENS, round(num_tokens / self.scale))


def write_lines(path: Path, lengths: Iterable[int]) -> None:
    """Write reproducible jobs of these lengths."""
    draw, words = random.Random(11), WORDS.split()
    with path.open("w", encoding="utf-8") as file:
        for index, length in enumerate(lengths):
            prompt = " ".join(draw.choices(words, k=NUM_WORDS))
            line = {"custom_id": f"job-{index}", "prompt": prompt, "max_tokens": length, "seed": index}
            file.write(json.dumps(line | SAMPLING) + "\n")


@contextmanager
def jobs_file_of(lengths: Iterable[int]) -> Iterator[Path]:
    with TemporaryDirectory(prefix="swiftbatch-batch-") as folder:
        write_lines(Path(folder) / "jobs.jsonl", lengths)
        yield Path(folder) / "jobs.jsonl"


@dataclass(frozen=True)
class StartedRun:
    folder: Path
    process: subprocess.Popen[str]

    @classmethod
    def of(cls, jobs_file: Path, name: str, options: BatchOptions, num_workers: int, *further: str) -> StartedRun:
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

    def figures(self) -> Record:
        """Wait for the end and measure. Raises BatchError."""
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
        """The process ignores this signal after a recent Ctrl-C."""
        self.process.terminate()
        # reads on, because a full pipe would block it
        if self.process.stderr is not None and not self.process.stderr.closed:
            self.process.communicate()


def figures_of(run: Run) -> Record:
    """Leave out the start of the workers."""
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
    """Return when each worker began its first job and ended its last."""
    starts, ends = dict[str, float](), dict[str, float]()
    for attempt in attempts:
        starts[attempt.worker_id] = min(starts.get(attempt.worker_id, attempt.start), attempt.start)
        ends[attempt.worker_id] = max(ends.get(attempt.worker_id, attempt.end), attempt.end)
    return starts, ends
