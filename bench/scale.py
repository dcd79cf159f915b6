"""A driver's cost with many jobs and stub workers.

As a module it is one stage: `python -m bench.scale STAGE OPTIONS`.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np

from bench.options import JSONOptions
from bench.peak_memory import peak_bytes, reset_peak
from bench.stub_workers import SimulatedClock, StubCalls
from bench.tables import Record
from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.python_processes import environment_of_code, module_command
from swiftbatch.jobs.run.output_line import success_line
from swiftbatch.jobs.run.result_files import ResultSegment
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import Progress
from swiftbatch.jobs.storage.store import Store
from swiftbatch.metrics.counters import DriverCounters
from swiftbatch.scheduler.cluster.ray_cluster import Cluster
from swiftbatch.scheduler.cluster.worker_actor import WorkerSpec
from swiftbatch.scheduler.display.events import Event
from swiftbatch.scheduler.driver.attempt_numbers import Attempts
from swiftbatch.scheduler.driver.driver import Driver
from swiftbatch.scheduler.driver.queue_loading import load_queue
from swiftbatch.scheduler.driver.run_lease import RunLease
from swiftbatch.scheduler.driver.run_limits import Limits, Spending
from swiftbatch.scheduler.driver.run_progress import DriverContext
from swiftbatch.scheduler.driver.worker_fleet import Fleet
from swiftbatch.scheduler.runs.cancellation import cancel_jobs
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.scheduler.runs.submission import submission
from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.session.result_writer import MOST_RESULTS

JOBS_FILE, RUN, OPTIONS_FILE = "jobs.jsonl", "run", "options.json"
WORDS = ("river", "lamp", "seven", "green", "walked", "slowly", "over", "the", "hill", "and", "found", "a", "letter")
NUM_WORDS = (10, 90)  # per prompt
MAX_TOKENS = (16, 4000)
MAX_ATTEMPTS = 5
PATIENCE = 1e9  # seconds: stub workers are never given up
MIB = 2**20
UNMEASURED = "finish"
FIGURES = (
    *("cpu_seconds", "us_per_job", "MiB", "busy", "ms_per_report", "num_reports", "num_finished", "num_requests"),
    *("us_per_ended", "turn_p99_seconds", "longest_without_beat_seconds"),
)

Result = TypeVar("Result")


class Options(JSONOptions):
    """Options; `share_done` of the jobs are done at the resume."""

    num_jobs: int = 10_000
    num_workers: int = 100
    num_slots: int = 8
    num_seconds: float = 20.0  # simulated, with working jobs
    store_ms: float = 0.0  # simulated time per request to the store: 100 in a busy bucket; 0: a disk
    share_done: float = 0.9
    folder: Path | None = None  # for the run, which is kept; memory (/dev/shm) is faster


class ScaleError(UserError):
    pass


def run(options: Options) -> Iterator[Record]:
    """Measure the driver with stub workers and a simulated clock: CPU seconds and memory, from submit to cancel.

    Nothing is generated, Ray is left out. `busy` is the driver's share of a core, a turn that of its loop.

    \b
    Example:
      python -m bench scale --jobs 100000 --workers 1000 --folder /dev/shm/scale --json scale.jsonl
    """
    with TemporaryDirectory(prefix="swiftbatch-scale-") as temporary:
        folder = options.folder or Path(temporary)
        if (folder / RUN).exists():
            raise ScaleError(f"--folder {folder}: found a run there, expected a folder without one")
        folder.mkdir(parents=True, exist_ok=True)
        asked = options.model_copy(update={"folder": folder})
        (folder / OPTIONS_FILE).write_text(asked.model_dump_json())
        write_jobs(folder / JOBS_FILE, options.num_jobs)
        for name in STAGES:
            found = _measured_apart(name, folder / OPTIONS_FILE)
            if name != UNMEASURED:
                yield found


def shown(records: list[Record], options: Options) -> list[Record]:
    """Return a row for each figure, with a column for each stage, so that the table fits into 80 characters."""
    return [{"figure": name} | {each["stage"]: each.get(name) for each in records} for name in FIGURES]


def write_jobs(path: Path, num_jobs: int) -> None:
    draw = random.Random(7)
    with path.open("w", encoding="utf-8") as file:
        for index in range(num_jobs):
            prompt = " ".join(draw.choices(WORDS, k=draw.randint(*NUM_WORDS)))
            max_tokens = int(MAX_TOKENS[0] * (MAX_TOKENS[1] / MAX_TOKENS[0]) ** draw.random())
            line = {"custom_id": f"request-{index:08d}", "prompt": prompt, "max_tokens": max_tokens}
            file.write(json.dumps(line) + "\n")


def _measured_apart(name: str, options_file: Path) -> Record:
    """Raises ScaleError."""
    command = module_command("bench.scale", name, str(options_file))
    process = subprocess.run(command, env=environment_of_code(), capture_output=True, text=True, check=False)
    if process.returncode != 0:
        last = (process.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ScaleError(f"the stage {name!r} ended with exit code {process.returncode}: {last}")
    figures: Record = json.loads(process.stdout.splitlines()[-1])
    return figures


def _folder(options: Options) -> Path:
    assert options.folder is not None
    return options.folder


def submit(options: Options) -> dict[str, float]:
    with submission(str(_folder(options) / JOBS_FILE), str(_folder(options) / RUN), Settings()) as made:
        return {"num_rejects": len(made.rejects)}


def drive(options: Options) -> dict[str, float]:
    clock = SimulatedClock()
    store = SlowStore(str(_folder(options) / RUN), clock, options.store_ms / 1000)
    run, beats = Run(store, Run.open(store.uri).manifest), BeatTimes(clock)
    calls = StubCalls(clock)
    cluster = Cluster(is_embedded=True, num_gpus=0, watch=None)
    fleet = Fleet(WorkerSpec(EngineConfig(), run.store.uri), cluster, PATIENCE, calls, clock.now)
    hold = RunLease(run, clock=clock.now)
    attempts = Attempts.read(run.store, hold.epoch.number)
    queue = load_queue(run, MAX_ATTEMPTS, attempts)
    context = DriverContext(
        *(run, queue, attempts, fleet, beats, DriverCounters(), options.num_workers, options.num_slots),
        grace_seconds=0.0,
        limits=Limits(),
        spent=Spending(),
        clock=clock.now,
    )
    driver = Driver(context, hold)
    turns = DriverTurns(calls, store, options.num_seconds, driver.request_stop)
    calls.at_turn = turns.turn
    driver.run()
    return turns.figures() | beats.figures(*turns.span)


class SlowStore(Store):
    """A folder with simulated delays."""

    def __init__(self, uri: str, clock: SimulatedClock, seconds: float) -> None:
        super().__init__(uri)
        self.is_local = not seconds
        self.num_requests = 0
        self._clock, self._seconds, self._loop = clock, seconds, threading.current_thread()

    def _try(self, action: str, path: str, call: Callable[[], Result], is_root_meant: bool = False) -> Result:
        self.num_requests += 1
        if threading.current_thread() is self._loop:
            self._clock.skip_to(self._clock.now() + self._seconds)
        return super()._try(action, path, call, is_root_meant)


class BeatTimes:
    """A display that records heartbeats."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self._times: list[float] = []

    def note(self, event: Event) -> None:
        pass

    def update(self, progress: Progress) -> None:
        self._times.append(self._clock.now())

    def figures(self, start: float, end: float) -> dict[str, float]:
        times = [start, *(time for time in self._times if start < time < end), end]
        return {"longest_without_beat_seconds": float(np.diff(times).max())}


class DriverTurns:
    """Runs a driver from its first turn until enough seconds passed."""

    def __init__(self, calls: StubCalls, store: SlowStore, num_seconds: float, stop: Callable[[], None]) -> None:
        self._calls, self._store, self._num_seconds, self._stop = calls, store, num_seconds, stop
        self._turns: list[tuple[float, float]] = []  # simulated time and CPU time
        self._counts = self._first = (0, 0, 0)

    def turn(self) -> None:
        if self._turns and self._turns[-1][0] - self._turns[0][0] >= self._num_seconds:
            self._stop()
            return
        self._turns.append((self._calls.clock.now(), self._calls.clock.cpu_seconds()))
        self._counts = (self._calls.num_reports, self._calls.num_finished, self._store.num_requests)
        if len(self._turns) == 1:
            self._first = self._counts

    @property
    def span(self) -> tuple[float, float]:
        return self._turns[0][0], self._turns[-1][0]

    def figures(self) -> dict[str, float]:
        (start, cpu_start), (end, cpu_end) = self._turns[0], self._turns[-1]
        num_reports, num_finished, num_requests = np.subtract(self._counts, self._first).tolist()
        turns = np.diff([now for now, _ in self._turns])
        return {
            "busy": (cpu_end - cpu_start) / max(end - start, 1e-9),
            "us_per_ended": 1e6 * (cpu_end - cpu_start) / max(num_finished, 1),
            "ms_per_report": 1e3 * (cpu_end - cpu_start) / max(num_reports, 1),
            "num_reports": num_reports,
            "num_finished": num_finished,
            "num_requests": num_requests,
            "turn_p99_seconds": float(np.quantile(turns, 0.99)) if len(turns) else 0.0,
        }


def finish(options: Options) -> dict[str, float]:
    run = Run.open(str(_folder(options) / RUN))
    records = run.jobs()
    ended = records[: int(len(records) * options.share_done)]
    for number, start in enumerate(range(0, len(ended), MOST_RESULTS)):
        results = ((record.job_id, _line(run, record)) for record in ended[start : start + MOST_RESULTS])
        run.write_segment(f"simulated-{number:04d}", ResultSegment(results))
    return {}


def _line(run: Run, record: JobRecord) -> dict[str, Any]:
    return success_line(
        *(record, run.manifest.run_id, "a text " * 8, "length"),
        model=run.manifest.model,
        system_fingerprint=run.manifest.fingerprint,
        token_ids=np.zeros(record.job.sampling.max_tokens, np.uint32),
        metrics={"seconds": 1.0},
    )


def resume(options: Options) -> dict[str, float]:
    run = Run.open(str(_folder(options) / RUN))
    queue = load_queue(run, MAX_ATTEMPTS)
    run.set_damaged_aside(queue.unfinished())
    return {"num_unfinished": queue.num_unfinished}


def cancel(options: Options) -> dict[str, float]:
    cancel_jobs(Run.open(str(_folder(options) / RUN)), None)
    return {}


STAGES: dict[str, Callable[[Options], dict[str, float]]] = {
    "submit": submit,
    "drive": drive,
    "finish": finish,
    "submit again": submit,
    "resume": resume,
    "cancel": cancel,
}


def measured(name: str, options: Options) -> Record:
    """Return a stage's CPU seconds and additional memory."""
    before, started = reset_peak(), time.process_time()
    figures = STAGES[name](options)
    seconds = time.process_time() - started
    own = {"cpu_seconds": seconds, "us_per_job": 1e6 * seconds / options.num_jobs, "MiB": (peak_bytes() - before) / MIB}
    return {"stage": name, **own, **figures}


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1], Options.model_validate_json(Path(sys.argv[2]).read_bytes()))))
