"""A command that gets a signal at a chosen moment, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.scheduler.driving import DEADLINE_SECONDS, swiftbatch

JOB = {"prompt": "the quick brown", "max_tokens": 3000, "ignore_eos": True, "min_p": 0.02}
NO_HANDLER_YET = (-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP)


@dataclass
class Submission:
    """A `submit` in its own process group."""

    run: Path
    ray_folder: Path
    log: Path
    process: subprocess.Popen[bytes]

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert self.process.poll() is None, f"it ended too soon:\n{self.output()}"
            assert time.monotonic() < deadline, f"waited in vain:\n{self.output()}"
            time.sleep(0.02)

    def end(self, number: signal.Signals, to_group: bool) -> int:
        (os.killpg if to_group else os.kill)(self.process.pid, number)
        return self.process.wait(DEADLINE_SECONDS)

    def is_ray_up(self) -> bool:
        return any(self.ray_folder.glob("*/session_*/sockets/*"))

    def state(self) -> str | None:
        path = self.run / "progress.json"
        return json.loads(path.read_text())["state"] if path.exists() else None

    def left_behind(self) -> list[str]:
        """Return Ray's processes and files shortly after its end."""
        deadline = time.monotonic() + 60
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)  # the kernel needs a moment to end them
        return left

    def _left(self) -> list[str]:
        running = [line for line in _command_lines() if str(self.ray_folder) in line]
        return [*running, *(path.name for path in self.ray_folder.iterdir())]


@contextmanager
def heard(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a command with all signals at their defaults."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_hear_all
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _command_lines() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue


@contextmanager
def submission(folder: Path, model: Path, *options: str) -> Iterator[Submission]:
    """Submit two jobs that take a while."""
    jobs = folder / "jobs.jsonl"
    jobs.write_text("".join(json.dumps(JOB | {"custom_id": name}) + "\n" for name in ("a", "b")))
    number = len(list(folder.glob("run-*.log")))
    run, log = folder / f"run-{number}", folder / f"run-{number}.log"
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="sig-", ignore_cleanup_errors=True) as ray_folder:
        command = swiftbatch("submit", str(jobs), "--run", str(run), "--model", str(model), "--threads", "1", *options)
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                env=os.environ | {"RAY_TMPDIR": ray_folder},
                start_new_session=True,
                preexec_fn=_hear_all,
            )
        try:
            yield Submission(run, Path(ray_folder), log, process)
        finally:
            process.kill()
            process.wait()
            print(log.read_text(errors="replace"))


def _hear_all() -> None:
    """Reset signals that `nohup` or a shell's background ignores."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
