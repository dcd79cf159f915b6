"""One `swiftbatch submit` or `resume` as a process of its own, as a user would start it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from swiftbatch.jobs.processes import module_command
from swiftbatch.scheduler.chaos.chaos_options import ChaosError

ENDED_WELL = (0, 1)  # 1: some jobs have no result, which the comparison tells


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
