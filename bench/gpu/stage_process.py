"""A stage in a process of its own: it imports what all stages need, waits for its order, tries, and records.

The order is a line of JSON. Whatever a try raises is its finding, and the next one goes on."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.gpu.gpu_stages import STAGES, GPUStage
from bench.gpu.stage_record import GPUStageRecord
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Result

if TYPE_CHECKING:
    from bench.gpu.trial import Trial, Try

MOST_WORDS = 300  # characters of an error that stand in a record; the log has all
Tries = Callable[["Trial"], "Iterable[Try]"]


def tried(stage: GPUStage, tries: Iterable[Try], folder: Path) -> GPUStageRecord:
    """Try all of a stage, and keep the record as findings come."""
    record, started = GPUStageRecord(stage=stage.name, state="running", proves=stage.proves), time.perf_counter()
    before = started
    for name, attempt in tries:
        finding = _finding(attempt)
        now = time.perf_counter()
        result = Result(name=name, proves=stage.name, seconds=now - before, finding=finding)
        record = record.model_copy(update={"results": (*record.results, result), "seconds": now - started})
        record.write(folder)
        print(result.page(), flush=True)
        before = now
    is_good = all(result.finding.passed for result in record.results)
    return record.model_copy(update={"state": "passed" if is_good else "failed"})


def _finding(attempt: Callable[[], Finding]) -> Finding:
    try:
        return attempt()
    except Exception as error:
        traceback.print_exc()
        return Finding(passed=False, words=f"{type(error).__name__}: {error}".splitlines()[0][:MOST_WORDS], rows=[])


def main(stages: Iterable[GPUStage], here: Callable[[Path], Trial]) -> None:
    """Wait for the order, follow it with a trial of what is `here`, and write the record."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    line = sys.stdin.readline()
    if not line:
        return  # the command ended, or has no stage for this process
    threading.Thread(target=_end_with_the_command, daemon=True).start()
    order = json.loads(line)
    folder = Path(order["folder"])
    stage = next(each for each in stages if each.name == order["stage"])
    module, function = stage.module_and_function
    tries: Tries = getattr(importlib.import_module(module), function)
    tried(stage, tries(here(Path(order["scratch"]))), folder).write(folder)
    sys.stdout.flush()
    os._exit(0)  # what a GPU's library does at the end of a process has no say in what was found


def _end_with_the_command() -> None:
    """Wait until nobody is at the other end of the pipe, then end, with all processes that this one has started."""
    while os.read(sys.stdin.fileno(), 1):  # not by the stream, whose lock an end of this process would wait for
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    from bench.gpu import trial

    main(STAGES, trial.here)
