"""The restart stage: a worker is killed, and another continues its job.

As a module this is a worker, without Ray.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.checkpoints import BenchWorker, make_run
from bench.gpu.trial import Trial, Try
from swiftbatch.jobs.python_processes import environment_of_code, module_command
from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.decode_bench import PROMPT, BenchError, digest
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row
from swiftbatch.worker.kv.kv_capacity import settled_free_bytes

PARTS = 6  # a worker prints after each of them
KILLED_AFTER = 3  # parts


def restart(trial: Trial) -> Iterator[Try]:
    yield "killed and resumed", functools.partial(_killed_and_resumed, trial)


def _killed_and_resumed(trial: Trial) -> Finding:
    folders = {name: _new_run(trial, name) for name in ("killed", "undisturbed")}
    rows: list[Row] = []
    started = time.perf_counter()
    killed = _Worker(trial, folders["killed"])
    ready = killed.number_of_tokens()
    rows.append({"what": "start up to the first tokens", "seconds": time.perf_counter() - started})
    while ready < KILLED_AFTER * trial.sizes.restart_tokens // PARTS:
        ready = killed.number_of_tokens()
    started, held = time.perf_counter(), _free_bytes(trial.device)
    killed.kill()
    if trial.device.type == "cuda":
        settled_free_bytes(trial.device)
    rows.append({"what": "memory is back", "seconds": time.perf_counter() - started})
    digests = {}
    for name, folder in folders.items():
        started = time.perf_counter()
        digests[name] = _Worker(trial, folder).last_word()
        rows.append({"what": f"the worker that was {name}, to the end", "seconds": time.perf_counter() - started})
    is_same = digests["killed"] == digests["undisturbed"]
    freed = (_free_bytes(trial.device) - held) / 1e9
    words = f"{'the same' if is_same else 'OTHER'} tokens after a kill behind {ready}; {freed:.1f} GB came back"
    return Finding(passed=is_same, words=words, rows=rows)


class _Worker:
    """A process with a worker's session."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        order = {
            "folder": str(folder),
            "num_tokens": trial.sizes.restart_tokens,
            "config": {
                "model": str(trial.decoded_files.path),
                "engine": "token-recycling",
                "dtype": trial.sizes.dtype,
                "device": trial.device.type,
                "checkpoint_seconds": 0.05,
                "checkpoint_tokens": max(128, trial.sizes.restart_tokens // (2 * PARTS)),
            },
        }
        self._process = subprocess.Popen(
            module_command(__name__, json.dumps(order)), env=environment_of_code(), stdout=subprocess.PIPE, text=True
        )

    def number_of_tokens(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"a worker ended with exit code {self._process.wait()}; the log says why")
        return int(line)

    def last_word(self) -> str:
        said, _ = self._process.communicate()
        if self._process.returncode != 0:
            raise BenchError(f"a worker ended with exit code {self._process.returncode}; the log says why")
        return said.split()[-1]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _new_run(trial: Trial, name: str) -> Path:
    folder = trial.scratch / f"restart-{name}"
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted stage
    make_run(folder, str(trial.decoded_files.path), PROMPT, 2 * trial.sizes.restart_tokens + PARTS)
    return folder


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def main(order: dict[str, Any]) -> None:
    """Work on the run's job and print the progress."""
    num_tokens = int(order["num_tokens"])
    worker = BenchWorker(Path(order["folder"]), EngineConfig(**order["config"]))
    for number in range(1, PARTS + 1):
        worker.generate_to(number * num_tokens // PARTS)
        print(worker.num_tokens, flush=True)
    print(digest(worker.output_ids[:num_tokens]), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
