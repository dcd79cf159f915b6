"""Starts the real command, watches its run, reads results."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunError, WorkerStatus

DEADLINE_SECONDS = 500


class Driver:
    """The context ends the command and shows its output."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], run: Path) -> None:
        self.run = run
        self._log = run.parent / f"driver-{time.time_ns()}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        print(self.output())

    def output(self) -> str:
        return self._log.read_text()

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """Fail if the command ends first."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := condition():
                return found
            time.sleep(0.05)
        raise AssertionError(f"waited in vain, or the run was over too soon:\n{self.output()}")

    def busy_workers(self) -> list[WorkerStatus]:
        """Return living workers with a job, by the newest heartbeat."""
        try:
            progress = Run.open(str(self.run)).progress()
        except RunError:
            return []
        if progress is None or progress.driver_pid != self.process.pid:
            return []
        return [worker for worker in progress.workers if worker.jobs and is_alive(worker.pid)]

    def checkpoints(self, worker: WorkerStatus) -> Path:
        job_ids = {record.job.custom_id: record.job_id for record in Run.open(str(self.run)).jobs()}
        return self.run / "checkpoints" / job_ids[worker.jobs[0]]


def wait_until(condition: Callable[[], Any], pause: float = 0.05) -> Any:
    """Check after each pause."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(pause)
    raise AssertionError("waited in vain")


def swiftbatch(*args: str) -> list[str]:
    return [sys.executable, "-m", "swiftbatch.scheduler.cli", *args]


def bodies(run: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "output.jsonl").read_text().splitlines()]
    return {line["custom_id"]: line["response"]["body"] for line in lines}


def outputs(run: Path) -> dict[str, Any]:
    return {custom_id: body["choices"] for custom_id, body in bodies(run).items()}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
