"""The run that is killed again and again, and goes on every time.

Each of its drivers is a `swiftbatch submit` or `resume` as a process of its own, as a user would start it.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swiftbatch.jobs.processes import module_command
from swiftbatch.jobs.run.run import Run, RunError
from swiftbatch.jobs.run.run_records import Progress
from swiftbatch.scheduler.chaos.chaos_options import ChaosError
from swiftbatch.scheduler.chaos.kills import Kind, PlannedKill, Way

ENDED_WELL = (0, 1)  # 1: some jobs have no result, which the comparison tells
POLL_SECONDS = 0.1
DEEDS: Mapping[Kind, str] = {
    "worker": "killed worker",
    "raylet": "killed raylet",
    "driver": "killed driver",
    "stop": "stopped worker",
    "hangup": "hung up on driver",
}


class DisturbedDriver:
    """The command, started; what it prints goes to a file."""

    def __init__(self, args: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        self._name = f"swiftbatch {args[0]}"
        self._output = output
        command = module_command("swiftbatch.scheduler.cli", *args)
        with output.open("wb") as file:  # a session of its own: Ctrl-C is for the chaos run, which then ends it
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=_hear_hangups,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Send SIGKILL; a driver that has ended is fine."""
        self._process.kill()
        self._process.wait()

    def hang_up(self) -> None:
        """Send SIGHUP, as when its terminal is closed, and wait until it has written its checkpoints."""
        self._process.send_signal(signal.SIGHUP)
        self._process.wait()

    def expect_success(self) -> None:
        """Wait for its end. Raises ChaosError, with the last line that it printed, if it gave up."""
        code = self._process.wait()
        if code not in ENDED_WELL:
            lines = self._output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = lines[-1] if lines else "nothing was printed"
            raise ChaosError(f"{self._name} ended with exit code {code}, expected 0: {last}")


def _hear_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the chaos run itself is under `nohup`


@dataclass(frozen=True)
class Kill:
    """A kill: its victim, the number of tokens that the run had then, and the seconds since the run's start."""

    kind: Kind
    victim: str
    num_tokens: int
    seconds: float


class DisturbedRun:
    """Carries out a plan of kills on a run that `submit` starts and `resume` goes on with."""

    def __init__(
        self,
        run_uri: str,
        submit: Callable[[str], DisturbedDriver],
        resume: Callable[[str], DisturbedDriver],
        ways: Mapping[Kind, Way],
        show: Callable[[str], None],
    ) -> None:
        self._run_uri = run_uri
        self._submit = submit
        self._resume = resume
        self._ways: Mapping[Kind, Way] = {
            **ways,
            "driver": partial(self._end_driver, DisturbedDriver.kill),
            "hangup": partial(self._end_driver, DisturbedDriver.hang_up),
        }
        self._show = show

    def run(self, plan: Sequence[PlannedKill]) -> list[Kill]:
        """Run to the end; returns the kills that were done: the run may be over before the last is due.

        Raises ChaosError when a driver gives up.
        """
        self._started = time.monotonic()
        self._driver = self._submit(self._run_uri)
        try:
            kills = [kill for planned in plan if (kill := self._carry_out(planned))]
            self._driver.expect_success()
        finally:
            self._driver.kill()
        return kills

    def _carry_out(self, planned: PlannedKill) -> Kill | None:
        """Wait until a kill is due, and do it; None if the run ended first."""
        while not self._driver.has_ended:
            progress = self._progress()
            if progress is not None and progress.num_generated_tokens >= planned.num_tokens:
                busy = [worker for worker in progress.workers if worker.jobs]
                victim = self._ways[planned.kind](busy) if busy else None
                if victim is not None:
                    seconds = round(time.monotonic() - self._started, 1)
                    self._show(f"{progress.num_generated_tokens:,} tokens: {DEEDS[planned.kind]} ({victim})")
                    return Kill(planned.kind, victim, progress.num_generated_tokens, seconds)
            time.sleep(POLL_SECONDS)
        return None

    def _progress(self) -> Progress | None:
        """The newest beat of the driver that runs now."""
        try:
            progress = Run.open(self._run_uri).progress()
        except RunError:  # not made yet
            return None
        return progress if progress is not None and progress.driver_pid == self._driver.pid else None

    def _end_driver(self, end: Callable[[DisturbedDriver], None], _workers: Sequence[object]) -> str:
        pid = self._driver.pid
        end(self._driver)
        self._driver = self._resume(self._run_uri)
        return f"process {pid}"
