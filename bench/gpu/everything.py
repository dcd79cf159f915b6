"""`python -m bench gpu --everything` and `--first`: GPU checks in stages.

Each stage is a process with a time limit, so that a hang costs only that stage. As a module this is such a process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench.tables import Record, tables
from swiftbatch.jobs.python_processes import environment_of_code, module_command
from swiftbatch.worker.decode_bench import BenchError
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding
from swiftbatch.worker.training.training_folder import held

if TYPE_CHECKING:
    from bench.gpu.trial import Trial, Try

PAGE, SCRATCH = "summary.md", "scratch"  # weights and runs, deleted after all stages
FEWEST_SECONDS = 15  # least time to start a stage
INTERPRETED = 20  # times as slow as a GPU
SETTLE_SECONDS = 5  # after a killed process, whose GPU memory is freed late
END_SECONDS, POLL_SECONDS = 20, 0.1  # from SIGTERM to SIGKILL
LOG_LINES = 3  # last lines of output in a record
MOST_WORDS = 300  # characters of an error in a record; the log has all
REHEARSAL = "**This ran in Triton's interpreter: it shows that all stages run, and proves nothing about a GPU.**"


@dataclass(frozen=True)
class GPUStage:
    """One stage; `proves` are items of docs/gpu_lab_book.md."""

    name: str
    place: str  # module:function that yields the attempts
    seconds: int  # its process is killed after them
    proves: tuple[str, ...] = ()

    def tries(self, trial: Trial) -> Iterable[Try]:
        module, _, function = self.place.partition(":")
        found: Callable[[Trial], Iterable[Try]] = getattr(importlib.import_module(module), function)
        return found(trial)

    def path(self, folder: Path) -> Path:
        return folder / f"{re.sub(r'[^a-z0-9]+', '-', self.name.lower())}.jsonl"


_FIRST, _JOBS, _STAGES = "bench.gpu.first:", "bench.gpu.jobs:", "bench.gpu.stages:"
FIRST = (  # within a quarter of an hour
    GPUStage("Ray", f"{_FIRST}ray_run", 180, ("A run over Ray on GPUs",)),
    GPUStage("many jobs", f"{_FIRST}many_jobs", 120, ("Steps of many jobs",)),
    GPUStage("packed products", f"{_FIRST}packed_products", 150, ("Packed weights",)),
    GPUStage("a model over Ray", f"{_FIRST}model_run", 420, ("A run over Ray on GPUs",)),
)
STAGES = (  # most valuable first
    *FIRST,
    GPUStage("products", f"{_STAGES}products", 90, ("Another GPU",)),
    GPUStage("rows", f"{_STAGES}rows", 120, ("Another GPU",)),
    GPUStage("attention", f"{_STAGES}attention", 90, ("Another GPU",)),
    GPUStage("packed", f"{_STAGES}packed", 90, ("Packed weights",)),
    GPUStage("kept rows", f"{_STAGES}kept_rows", 90, ("Keys and values in 8 bits",)),
    GPUStage("bits", f"{_STAGES}bits", 300, ("Pages", "Keys and values in 8 bits", "Experts")),
    GPUStage(*("rows of kinds", f"{_STAGES}rows_of_kinds", 240), ("Experts", "Latent attention", "Layers with states")),
    GPUStage("draws", f"{_STAGES}draws", 90, ("The noise of draws in float32",)),
    GPUStage("jobs", f"{_JOBS}jobs", 150, ("Steps of many jobs", "The reserves", "Forwards of 128 and 256 rows")),
    GPUStage("families", f"{_JOBS}families", 150, ("Experts", "Latent attention", "Layers with states")),
    GPUStage("host", "bench.gpu.host:host", 60, ("Steps of many jobs",)),
    GPUStage("wide products", f"{_STAGES}wide_products", 120, ("Forwards of 128 and 256 rows",)),
    GPUStage("copies", f"{_STAGES}copies", 90, ("Copies beside the computation",)),
    GPUStage("graph memory", f"{_STAGES}graph_memory", 60, ("The reserves",)),
    GPUStage("loading", f"{_STAGES}loading", 60, ("Loading weights",)),
    GPUStage("second process", f"{_STAGES}second_process", 120, ("Another GPU",)),
    GPUStage("engines", f"{_STAGES}engines", 180, ("Every engine",)),
    GPUStage("flash", f"{_STAGES}flash", 120, ("flash-attn",)),
    GPUStage(
        *("kinds of models", f"{_STAGES}kinds", 300),
        ("Latent attention", "Layers with states", "Other kinds of models"),
    ),
    GPUStage("predictors", f"{_STAGES}predictors", 180, ("Layers that predict further tokens",)),
    GPUStage("tests", f"{_STAGES}tests", 300, ("Every engine",)),
)


def run_everything(output: Path, minutes: float, stages: Sequence[GPUStage] = STAGES) -> Iterator[Record]:
    """Run the missing stages.

    Exits with 1 if any failed. Raises BenchError without a GPU, ModelError if the folder is in use.
    """
    is_gpu, deadline = torch.cuda.is_available(), time.monotonic() + 60 * minutes
    if not is_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise BenchError(
            f"no GPU to measure: no CUDA device is visible to torch {torch.__version__}; "
            "TRITON_INTERPRET=1 tries all stages in Triton's interpreter, with small sizes"
        )
    with held(output):
        (output / SCRATCH).mkdir(exist_ok=True)
        missing, waiting = [stage for stage in stages if "state" not in last_of(stage, output)], None
        try:
            for number, stage in enumerate(missing):
                left = deadline - time.monotonic()
                if left < FEWEST_SECONDS:
                    yield {"stage": stage.name, "state": "not reached", "words": "", "seconds": 0.0}
                    continue
                process, later = waiting or StageProcess(stage, output), missing[number + 1 : number + 2]
                waiting = StageProcess(later[0], output) if later else None
                yield process.run(min(stage.seconds * (1 if is_gpu else INTERPRETED), left))
                (output / PAGE).write_text(page_of(stages, output), encoding="utf-8")
        finally:
            if waiting is not None:
                waiting.kill()
        states = [last_of(stage, output).get("state") for stage in stages]
        if all(states):
            for log in (output / SCRATCH).glob("*/driver-*.log"):
                shutil.copy(log, output / f"{log.parent.name}-{log.name}")
            shutil.rmtree(output / SCRATCH, ignore_errors=True)
    if set(states) != {"passed"}:
        sys.exit(1)


def records_of(stage: GPUStage, folder: Path) -> list[Record]:
    path = stage.path(folder)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def last_of(stage: GPUStage, folder: Path) -> Record:
    return (records_of(stage, folder) or [{}])[-1]


def page_of(stages: Sequence[GPUStage], folder: Path) -> str:
    """Return the page: proved items, stages, figures."""
    found = {stage.name: records_of(stage, folder) for stage in stages}
    items = dict.fromkeys(item for stage in stages for item in stage.proves)
    proved = [
        {"item": item, "stages": ", ".join(names), "proved": _verdict([found[name] for name in names])}
        for item in items
        for names in [[stage.name for stage in stages if item in stage.proves]]
    ]
    states = [(found[stage.name] or [{}])[-1] for stage in stages]
    overview = [
        {
            "stage": stage.name,
            "state": each.get("state", "not reached"),
            "seconds": each.get("seconds"),
            "why": each.get("words"),
        }
        for stage, each in zip(stages, states, strict=True)
    ]
    parts = ["# Everything on a GPU", *([] if torch.cuda.is_available() else [REHEARSAL])]
    parts += [tables(proved, is_markdown=True), tables(overview, is_markdown=True)]
    for stage in stages:
        parts.append(f"## {stage.name}")
        for each in (each for each in found[stage.name] if "rows" in each):
            verdict = "" if each["passed"] else "**FAILED** "
            parts.append(f"{verdict}{each['try']}: {each['words']} ({each['seconds']:.1f} s)")
            parts += [tables(each["rows"], is_markdown=True)] if each["rows"] else []
    return "\n\n".join(parts) + "\n"


def _verdict(stages: list[list[Record]]) -> str:
    """Return "yes" if all stages of an item passed and tried everything."""
    states = [(records or [{}])[-1].get("state") for records in stages]
    if any(state not in (None, "passed") for state in states):
        return "**no**"
    untried = [each["unproved"] for records in stages for each in records if each.get("unproved")]
    return "not reached" if None in states else f"not tried: {untried[0]}" if untried else "yes"


class StageProcess:
    """A process that imports a stage's modules and waits for its turn."""

    def __init__(self, stage: GPUStage, folder: Path) -> None:
        self._stage, self._folder = stage, folder
        self._log = stage.path(folder).with_suffix(".log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*module_command("bench.gpu.everything"), stage.name, stage.place, str(folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment_of_code(),
                start_new_session=True,  # so that its children are killed with it
            )

    def run(self, seconds: float) -> Record:
        started, path = time.monotonic(), self._stage.path(self._folder)
        path.write_text("")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # stays open: the process ends with this one
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        state, words = "ended", ""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            state = "killed"
        self.kill()
        found = last_of(self._stage, self._folder)
        if "state" in found:
            return found
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
        words = f"with exit code {self._process.returncode}: {' / '.join(line.strip() for line in lines)[:400]}"
        time.sleep(SETTLE_SECONDS if torch.cuda.is_available() else 0)
        return _add(
            path, {"stage": self._stage.name, "state": state, "words": words, "seconds": time.monotonic() - started}
        )

    def kill(self) -> None:
        """Kill the process and its children, which may first end clusters of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            deadline = time.monotonic() + END_SECONDS
            while time.monotonic() < deadline:
                self._process.poll()
                os.killpg(self._process.pid, 0)
                time.sleep(POLL_SECONDS)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()


def _add(path: Path, record: Record) -> Record:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    return record


def tried(stage: GPUStage, trial: Trial, folder: Path) -> Record:
    """Save records; an exception becomes a finding."""
    started, all_passed = time.perf_counter(), True
    for name, attempt in stage.tries(trial):
        before = time.perf_counter()
        try:
            finding = attempt()
        except Exception as error:
            traceback.print_exc()
            finding = Finding(
                passed=False, words=f"{type(error).__name__}: {error}".splitlines()[0][:MOST_WORDS], rows=[]
            )
        all_passed &= finding.passed
        found: Record = {"try": name, "seconds": time.perf_counter() - before} | finding.model_dump(exclude={"linear"})
        print(tables([_add(stage.path(folder), found), *found["rows"]]), flush=True)
    state = "passed" if all_passed else "failed"
    seconds = time.perf_counter() - started
    return _add(stage.path(folder), {"stage": stage.name, "state": state, "words": "", "seconds": seconds})


def main(name: str, place: str, folder: Path) -> None:
    """Import, wait for the turn, and run the stage."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    importlib.import_module(place.partition(":")[0])
    from bench.gpu import trial

    if not sys.stdin.readline():
        return  # the parent ended
    threading.Thread(target=_end_with_the_command, daemon=True).start()
    tried(GPUStage(name, place, 0), trial.here(folder / SCRATCH), folder)
    sys.stdout.flush()
    os._exit(0)  # a GPU library's failure at exit must not change the result


def _end_with_the_command() -> None:
    """End this process group when the parent closes the pipe."""
    while os.read(0, 1):  # not by the stream, whose lock would block the exit
        pass
    os.killpg(os.getpgid(0), signal.SIGTERM)  # a chaos run then ends its cluster


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
