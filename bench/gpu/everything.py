"""`python -m bench gpu --everything`: all that a machine with a GPU has to show, stage by stage, within some minutes.

Each stage has a process of its own, which is killed when its time is over: a hang, or an access to memory that is not
there, costs that stage alone. The next process is made ready while one runs, since imports take seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from bench.gpu.everything_page import PAGE, page_of
from bench.gpu.gpu_stages import STAGES, GPUStage
from bench.gpu.stage_record import GPUStageRecord, file_name, read_record
from swiftbatch.jobs.python_processes import environment_of_code, module_command
from swiftbatch.jobs.storage.store import Store
from swiftbatch.worker.bench_texts import BenchError
from swiftbatch.worker.training.training_lock import held

PROCESS = "bench.gpu.stage_process"
FEWEST_SECONDS = 15  # that are worth the start of a stage
INTERPRETED = 20  # times as long as a GPU may take
SETTLE_SECONDS = 5  # behind a process that did not end by itself, whose memory a GPU gives back late
LOG_LINES = 3  # of what a process said last that stand in its record
SCRATCH = "scratch"  # in the folder: weights and runs, which are removed when all stages are over


def stages_here() -> tuple[GPUStage, ...]:
    """The stages with their times on this machine: Triton's interpreter takes long even for small sizes."""
    if torch.cuda.is_available():
        return STAGES
    return tuple(replace(stage, seconds=INTERPRETED * stage.seconds) for stage in STAGES)


@dataclass(frozen=True)
class EverythingOptions:
    """A folder for records and page, the minutes for all stages, and the process that runs one."""

    output: Path
    minutes: float
    stages: Sequence[GPUStage] = field(default_factory=stages_here)
    command: Sequence[str] = tuple(module_command(PROCESS))


def run_everything(options: EverythingOptions, report: Callable[[str], None] = lambda line: None) -> bool:
    """Run what the folder lacks; True where all has passed. `report` gets a line about each stage.

    Raises BenchError without a GPU, and ModelError where another process measures into the same folder.
    """
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise BenchError(
            f"no GPU to measure: no CUDA device is visible to torch {torch.__version__}; "
            "TRITON_INTERPRET=1 tries all stages in Triton's interpreter, with small sizes"
        )
    with held(options.output):
        records = _StageRuns(options, report).run()
        if len(records) == len(options.stages):
            shutil.rmtree(options.output / SCRATCH, ignore_errors=True)
    return len(records) == len(options.stages) and all(record.state == "passed" for record in records)


class _StageRuns:
    """The stages of one command, one after the other."""

    def __init__(self, options: EverythingOptions, report: Callable[[str], None]) -> None:
        self._options, self._report = options, report
        self._deadline = time.monotonic() + 60 * options.minutes
        self._spare: StageProcess | None = None

    def run(self) -> list[GPUStageRecord]:
        """Return the records of all stages that are over; the page is written anew behind each."""
        options = self._options
        (options.output / SCRATCH).mkdir(exist_ok=True)
        known = {stage.name: read_record(options.output, stage.name) for stage in options.stages}
        missing = [stage for stage in options.stages if not ((kept := known[stage.name]) and kept.is_over)]
        try:
            for stage in missing:
                left = self._deadline - time.monotonic()
                if left < FEWEST_SECONDS:
                    self._report(f"{stage.name}: not reached; the same command goes on from here")
                    continue
                known[stage.name] = self._run(stage, min(stage.seconds, left), has_next=stage is not missing[-1])
                self._write_page(known)
        finally:
            if self._spare is not None:
                self._spare.kill()
        self._write_page(known)
        return [record for record in known.values() if record is not None and record.is_over]

    def _run(self, stage: GPUStage, seconds: float, has_next: bool) -> GPUStageRecord:
        self._report(f"{stage.name}: at most {seconds:.0f} s")
        process, folder = self._spare or StageProcess(self._options), self._options.output
        started, log = time.monotonic(), folder / f"{file_name(stage.name)}.log"
        begun = GPUStageRecord(stage=stage.name, state="running", proves=stage.proves)
        begun.write(folder)
        process.begin(stage, log)
        self._spare = StageProcess(self._options) if has_next else None
        exit_code = process.wait(seconds)
        record = read_record(folder, stage.name) or begun
        if not record.is_over:
            took = time.monotonic() - started
            state, words = ("killed", f"after {took:.0f} s") if exit_code is None else ("ended", _last(exit_code, log))
            record = record.model_copy(update={"state": state, "words": words, "seconds": took})
            record.write(folder)
            time.sleep(SETTLE_SECONDS if torch.cuda.is_available() else 0)
        self._report(f"{stage.name}: {record.state} {record.words}".rstrip() + f" ({record.seconds:.0f} s)")
        return record

    def _write_page(self, known: dict[str, GPUStageRecord | None]) -> None:
        page = page_of(self._options.stages, known, is_rehearsal=not torch.cuda.is_available())
        Store(str(self._options.output)).write(PAGE, page.encode())


class StageProcess:
    """A process that has imported what stages need, or is about to, and waits for its order."""

    def __init__(self, options: EverythingOptions) -> None:
        self._folder = options.output
        self._log = (self._folder / SCRATCH / f"process-{time.monotonic_ns()}.log").open("wb")
        self._process = subprocess.Popen(
            options.command,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment_of_code(),
            start_new_session=True,  # so that all that it starts is killed with it
        )

    def begin(self, stage: GPUStage, log: Path) -> None:
        """Give it its order; from now on its words are in the file `log`."""
        Path(self._log.name).replace(log)
        order = {"stage": stage.name, "folder": str(self._folder), "scratch": str(self._folder / SCRATCH)}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # where it has ended, `wait` tells
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()  # it stays open: the process ends with this one

    def wait(self, seconds: float) -> int | None:
        """Return the process's exit code; None where it had to be killed."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.kill()

    def kill(self) -> None:
        """End it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._log.close()


def _last(exit_code: int, log: Path) -> str:
    """The end of a process in a line: its exit code, and what it said last."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = " / ".join(line.strip() for line in lines[-LOG_LINES:])
    return f"with exit code {exit_code}" + (f": {said[:400]}" if said else "")
