"""A batch's driver as a child process: `submit` until all lines are in the run, then `resume`."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO

from swiftbatch.jobs.checkpoints.checkpoint_writer import GRACE_SECONDS
from swiftbatch.jobs.python_processes import environment_of_code, module_command
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.process.signals import BAD_INPUT, EMPTY_INPUT
from swiftbatch.scheduler.serve.records.batch_status import is_submitted
from swiftbatch.scheduler.serve.records.stored_objects import Batch, StoredFiles
from swiftbatch.worker.config import Computation

MAX_EVENTS = 1000  # events kept for later readers
MAX_LOG_BYTES = 4 * 2**20  # of each of the two log files
READ_SECONDS = 0.5  # for its last output; its children may keep the streams open
ERROR_PREFIX = "swiftbatch: "
INPUT_CODES = {BAD_INPUT: "invalid_input_file", EMPTY_INPUT: "empty_file"}

Told = tuple[int, str, str]
"""The number of an event, which counts on, its kind, and the event as JSON."""


@dataclass(frozen=True)
class DriverOptions:
    """The server's command-line options for drivers."""

    of_run: tuple[str, ...] = ()
    of_start: tuple[str, ...] = ()
    grace_seconds: float = GRACE_SECONDS
    model: str = Computation.model  # of new batches; also among the words of `of_run`
    adapters: tuple[str, ...] = ()  # their names, likewise


def driver_arguments(batch: Batch, files: StoredFiles, options: DriverOptions) -> list[str]:
    """Return the arguments of `swiftbatch`. Raises StoreError.

    After a kill, `submit` completes the run from the same file.
    """
    run_uri, record = batch.store.uri, batch.record
    deadline = f"{max(0.0, batch.seconds_left):.3f}s"
    start = [*options.of_start, "--takeover", "--json", "--deadline", deadline]
    if is_submitted(batch.store):
        return ["resume", run_uri, *start]
    input_uri = files.uri(record.input_file_id)
    team = [] if batch.owner is None else ["--team", batch.owner]
    return ["submit", input_uri, "--run", run_uri, "--endpoint", record.endpoint, *team, *options.of_run, *start]


class DriverProcess:
    """A working driver. It dies with the thread that created it."""

    def __init__(self, arguments: Sequence[str], run: Store, first_number: int = 0) -> None:
        command = module_command("swiftbatch.scheduler.batch_driver_main", str(os.getpid()), *arguments)
        self.events: deque[Told] = deque(maxlen=MAX_EVENTS)
        self.metrics_address: str | None = None
        self.has_begun = False  # with jobs; before that it starts Ray
        self.num_total_tokens = 0  # as in `Progress`, over all drivers of the run
        self.problem = ""  # its last error line
        self._number = first_number
        self._log = _log_of(run)
        self._process = subprocess.Popen(
            command,
            env=environment_of_code(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C must only reach the server
        )
        self._readers = [self._read(self._process.stdout, self._take), self._read(self._process.stderr, self._note)]

    def has_ended(self) -> bool:
        """Return whether the process ended and its output was read."""
        if self._process.poll() is None:
            return False
        for reader in self._readers:
            reader.join(READ_SECONDS)
        return True

    @property
    def bad_input(self) -> str | None:
        """Return OpenAI's code of an input file that made it end."""
        return INPUT_CODES.get(self._process.returncode)

    def ask_to_end(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))
        return self._process.poll() is not None

    def close(self) -> None:
        for handler in self._log.handlers:
            handler.close()

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _read(self, stream: IO[str] | None, take: Callable[[str], None]) -> threading.Thread:
        assert stream is not None

        def read() -> None:
            with stream:
                for line in stream:
                    self._log.info(line.rstrip("\n"))
                    take(line)

        thread = threading.Thread(target=read, name="driver-output", daemon=True)
        thread.start()
        return thread

    def _take(self, line: str) -> None:
        try:
            event = json.loads(line)
            kind = str(event["event"])
        except (ValueError, TypeError, KeyError):
            return
        if kind == "metrics_served":
            self.metrics_address = event["address"]
        elif kind == "driver_started":
            self.has_begun = True
        elif kind == "progress":
            self.num_total_tokens = event["num_total_tokens"]
        self._number += 1
        self.events.append((self._number, kind, line.strip()))

    def _note(self, line: str) -> None:
        if line.startswith(ERROR_PREFIX):
            self.problem = line.removeprefix(ERROR_PREFIX).strip()


def _log_of(run: Store) -> logging.Logger:
    """Open a log in a local run folder, or in memory."""
    log = logging.Logger("driver", logging.INFO)
    if run.is_local:
        path = Path(run.uri) / "logs" / "driver.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        log.addHandler(RotatingFileHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=1, encoding="utf-8"))
    return log
