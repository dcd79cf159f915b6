"""The run that is killed repeatedly; drivers are `swiftbatch` processes, as users start them."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Protocol

from swiftbatch.jobs.python_processes import module_command
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import Progress, RunError
from swiftbatch.scheduler.chaos.chaos_options import STORE_RETRIES, ChaosError
from swiftbatch.scheduler.chaos.faults import Kind, NodeFaults, NoNodeFaults, PlannedKill, Way
from swiftbatch.scheduler.driver.run_lease import claims, liveness

ENDED_WELL = (0, 1)  # 1: some jobs failed, which the comparison shows
GAVE_UP = 2  # the driver can't continue; its files are complete
POLL_SECONDS = 0.1
WAKES_SECONDS = 3.0  # a stopped driver wakes within this time after another claims its run
NOTICES_SECONDS = 120.0  # one of two drivers must stop within this time, also on a busy machine
DEEDS: Mapping[Kind, str] = {
    "worker": "killed worker",
    "raylet": "killed raylet",
    "driver": "killed driver",
    "stop": "stopped worker",
    "hangup": "hung up on driver",
    "rival": "stopped driver, and had another one take over",
    "hang": "stopped node",
    "cut": "cut off node",
    "drain": "drained node",
    "freeze": "stopped head",
    "isolate": "cut off driver",
}


class DisturbedDriver:
    """A running command; its output goes to a file."""

    def __init__(
        self, args: Sequence[str], environment: Mapping[str, str], output: Path, prefix: Sequence[str] = ()
    ) -> None:
        """Start the command; `prefix` is the command that enters the driver's host."""
        self._name = f"swiftbatch {args[0]}"
        self._output = output
        command = [*prefix, *module_command("swiftbatch.scheduler.cli", *args)]
        with output.open("wb") as file:  # in a session of its own, since Ctrl-C must reach only the chaos run
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                # hears hangups, though the chaos run itself may be under `nohup`
                preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def has_given_up(self) -> bool:
        return self._process.poll() == GAVE_UP

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def expect(self, *codes: int) -> None:
        """Wait until the command ends. Raises ChaosError for an exit code that is not in `codes`."""
        code = self._process.wait()
        if code not in codes:
            lines = self._output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = lines[-1] if lines else "nothing was printed"
            raise ChaosError(f"{self._name} ended with exit code {code}, expected {codes[0]}: {last}")


@dataclass(frozen=True)
class Kill:
    """A kill, and how many tokens the run had and how long it had run at that moment."""

    kind: Kind
    victim: str
    num_tokens: int
    seconds: float


class Commands(Protocol):
    def submit(self, run_uri: str) -> DisturbedDriver: ...

    def resume(self, run_uri: str) -> DisturbedDriver: ...

    def take_over(self, run_uri: str) -> DisturbedDriver: ...


class DisturbedRun:
    """Executes a plan of kills on a run."""

    def __init__(
        self,
        run_uri: str,
        commands: Commands,
        ways: Mapping[Kind, Way],
        troubles: NodeFaults | NoNodeFaults,
        random: Random,
        show: Callable[[str], None],
    ) -> None:
        self._run_uri = run_uri
        self._commands = commands
        self._ways: Mapping[Kind, Way] = {
            **ways,
            "driver": partial(self._end_driver, signal.SIGKILL),
            "hangup": partial(self._end_driver, signal.SIGHUP),  # as if its terminal closed
            "rival": self._rival_driver,
        }
        self._troubles = troubles
        self._random = random
        self._show = show

    def run(self, plan: Sequence[PlannedKill]) -> list[Kill]:
        """Run to the end; return the kills done. Raises ChaosError when a driver gives up."""
        self._started = time.monotonic()
        self._driver = self._commands.submit(self._run_uri)
        try:
            kills = [kill for planned in plan if (kill := self._carry_out(planned))]
            while self._is_running():
                time.sleep(POLL_SECONDS)
            self._driver.expect(*ENDED_WELL)
        finally:
            self._driver.kill()
        return kills

    def _carry_out(self, planned: PlannedKill) -> Kill | None:
        while self._is_running():
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

    def _is_running(self) -> bool:
        """Return whether the run goes on; restart a driver that gave up."""
        self._troubles.tend()
        if self._driver.has_given_up and self._troubles.may_end_a_driver():
            self._show("the driver gave up; resuming")
            self._driver = self._commands.resume(self._run_uri)
        return not self._driver.has_ended

    def _progress(self) -> Progress | None:
        try:
            progress = self._open().progress()
        except RunError:  # the run is not made yet
            return None
        return progress if progress is not None and progress.driver_pid == self._driver.pid else None

    def _open(self) -> Run:
        """Open the run with long retries. Raises RunError."""
        return Run.open(self._run_uri, STORE_RETRIES)

    def _end_driver(self, number: signal.Signals, _workers: Sequence[object]) -> str:
        pid = self._driver.pid
        self._driver.signal(number)
        while not self._driver.has_ended:
            self._wait(POLL_SECONDS)
        self._driver = self._commands.resume(self._run_uri)
        return f"process {pid}"

    def _rival_driver(self, _workers: Sequence[object]) -> str:
        """Stop the driver, and wake it after another takes the run over."""
        first = self._driver
        first.signal(signal.SIGSTOP)
        run = self._open()
        while liveness(run, run.progress()) == "alive":
            self._wait(POLL_SECONDS)
        second = self._commands.take_over(self._run_uri)
        try:
            while not second.has_ended and claims(run)[-1].pid != second.pid:
                self._wait(POLL_SECONDS)
            self._wait(self._random.uniform(0, WAKES_SECONDS))
            first.signal(signal.SIGCONT)
            self._driver = self._one_of(first, second)
        finally:
            for driver in {first, second} - {self._driver}:
                driver.kill()
        return f"process {first.pid}, then {second.pid}"

    def _one_of(self, first: DisturbedDriver, second: DisturbedDriver) -> DisturbedDriver:
        """Return the one of two drivers that still holds the run, after the other has ended.

        Raises ChaosError.
        """
        last = time.monotonic() + NOTICES_SECONDS
        while time.monotonic() < last:
            for loser, holder in ((first, second), (second, first)):
                if loser.has_ended:
                    loser.expect(GAVE_UP)
                    return holder
            self._wait(POLL_SECONDS)
        raise ChaosError(f"processes {first.pid} and {second.pid} both hold {self._run_uri}: expected one to stop")

    def _wait(self, seconds: float) -> None:
        last = time.monotonic() + seconds
        while time.monotonic() < last:
            self._troubles.tend()
            time.sleep(POLL_SECONDS)
