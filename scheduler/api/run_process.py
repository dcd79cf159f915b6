"""The process of a run that a Python program started: the command `submit`, whose events the program reads."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.python_processes import environment_of_code, module_command

LOG = logging.getLogger("swiftbatch")
USER_ERROR = 2
NUM_KEPT_LINES = 20  # of stderr, for a process that crashed


class RunProcess:
    """`swiftbatch submit` in a process of its own session, so that an interrupted cell does not stop the run.

    When the program ends, the process gets SIGTERM and saves all tokens.
    """

    def __init__(self, arguments: Sequence[str], lines: Iterable[bytes] | None) -> None:
        """Start the command and wait until the run holds its jobs.

        The command reads `lines` as its standard input. Raises UserError with the command's message.
        """
        self._has_jobs = False
        self._owner = os.getpid()
        self._messages = deque[str](maxlen=NUM_KEPT_LINES)
        self._is_open = threading.Event()
        self._process = subprocess.Popen(
            module_command("swiftbatch.scheduler", "submit", *arguments),
            stdin=subprocess.DEVNULL if lines is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment_of_code(),
            start_new_session=True,
        )
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_events, self._read_errors)]
        for reader in self._readers:
            reader.start()
        atexit.register(self.stop)
        self._feed(lines)
        try:
            self._is_open.wait()
        except BaseException:
            self.stop()
            raise
        if not self._has_jobs:
            self.wait()
            raise UserError(self._reason())

    def _feed(self, lines: Iterable[bytes] | None) -> None:
        if (stdin := self._process.stdin) is None:
            return
        try:
            for line in lines or ():
                stdin.write(line)
        except BrokenPipeError:
            pass  # the command ended, and its message says why
        except BaseException:
            self._process.kill()  # before its input ends: the lines so far are not all
            self._end()
            raise
        finally:
            with contextlib.suppress(BrokenPipeError):
                stdin.close()

    def _read_events(self) -> None:
        assert self._process.stdout is not None  # for mypy
        with self._process.stdout as lines:
            for line in lines:
                if (event := _event(line)) is None:
                    continue
                if event["event"] == "run_opened":
                    self._has_jobs = True
                    self._is_open.set()
                if event["event"] != "progress":
                    LOG.info("%s", _shown(event))
        self._is_open.set()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None  # for mypy
        with self._process.stderr as lines:
            for line in lines:
                message = line.decode(errors="replace").rstrip()
                self._messages.append(message)
                LOG.info("%s", message)

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether the process ended within `timeout` seconds.

        Raises UserError if the run had to stop, or if the process crashed.
        """
        if os.getpid() != self._owner:
            raise UserError("this process is a copy of the one that started the run; swiftbatch.Run.open follows it")
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        self._end()
        if self._has_jobs and (code == USER_ERROR or code < 0):
            raise UserError(self._reason())
        return True

    def stop(self) -> None:
        """Ask the process to save all tokens and end, and wait for that."""
        if os.getpid() != self._owner:  # in a child that inherited the object
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(UserError):
            self.wait()

    def _end(self) -> None:
        self._process.wait()
        for reader in self._readers:
            reader.join()
        atexit.unregister(self.stop)

    def _reason(self) -> str:
        if self._process.returncode == USER_ERROR and self._messages:
            return self._messages[-1].removeprefix("swiftbatch: ")
        last = f"; its last line: {self._messages[-1]}" if self._messages else ""
        hint = "; nothing is lost, submit the same jobs again to go on" if self._has_jobs else ""
        return f"the run's process ended with exit code {self._process.returncode}{last}{hint}"


def _event(line: bytes) -> dict[str, Any] | None:
    """Return an event, or None for a line that another library printed."""
    try:
        event: dict[str, Any] = json.loads(line)
        return event if "event" in event else None
    except (ValueError, TypeError):
        LOG.info("%s", line.decode(errors="replace").rstrip())
        return None


def _shown(event: dict[str, Any]) -> str:
    fields = " ".join(f"{name}={value}" for name, value in event.items() if name not in ("event", "time"))
    return f"{event['event']} {fields}".rstrip()
