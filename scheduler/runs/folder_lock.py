"""The hold on a folder of runs: at most one `nightly` and one `serve` work there at a time.

nightly.json, serve.json    the holder's heartbeat, deleted when it ends

Clocks may let holders overlap briefly, which is harmless: each run has one driver.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from swiftbatch.jobs.checkpoints.checkpoint_files import Moment
from swiftbatch.jobs.run.run_records import ProcessKey, RunError, pretty, read_model
from swiftbatch.jobs.storage.store import Store, StoreError
from swiftbatch.metrics.report.page_text import date
from swiftbatch.scheduler.driver.run_lease import BEAT_SECONDS_OBJECT_STORE, process_liveness
from swiftbatch.scheduler.process.process_id import own_key
from swiftbatch.scheduler.process.streams import Lines

POLL_SECONDS = 2.0


class FolderHeldError(RunError):
    """The same command already works on these runs."""


class Holder(BaseModel):
    """The content of `COMMAND.json`; times in seconds since the epoch."""

    model_config = ConfigDict(frozen=True)

    holder_id: str
    host: str
    pid: int
    process: ProcessKey | None = None
    started: Moment
    updated: Moment


class FolderLease:
    """A command's hold on a folder of runs, renewed by a thread."""

    def __init__(self, runs: Store, command: str) -> None:
        now = time.time()
        self._runs = runs
        self._command = command
        self._holder = Holder(
            holder_id=secrets.token_hex(8),
            host=socket.gethostname(),
            pid=os.getpid(),
            process=own_key(),
            started=now,
            updated=now,
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="folder-hold", daemon=True)
        self._runs.write(file_of(self._command), pretty(self._holder))
        self._thread.start()

    def check(self) -> None:
        """Raise FolderHeldError if another command took over, as after a long silence of this one."""
        holder = _read(self._runs, self._command)
        if holder is not None and holder.holder_id != self._holder.holder_id:
            who = _who(self._runs, self._command, holder)
            raise FolderHeldError(f"{who} has taken over; this one stops and leaves the rest to it")

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(StoreError, RunError):  # otherwise it goes stale soon
            self.check()
            self._runs.delete(file_of(self._command))

    def _renew(self) -> None:
        while not self._ended.wait(BEAT_SECONDS_OBJECT_STORE):
            with contextlib.suppress(StoreError, RunError):  # the next heartbeat comes soon, and `check` reports a loss
                self.check()
                self._runs.write(
                    file_of(self._command), pretty(self._holder.model_copy(update={"updated": time.time()}))
                )


@contextlib.contextmanager
def hold(runs: Store, is_patient: bool, command: str) -> Iterator[FolderLease]:
    """Hold a folder of runs; if it is taken, wait (`is_patient`) or raise FolderHeldError."""
    is_told = False
    while (holder := _other_holder(runs, command)) is not None:
        if not is_patient:
            raise FolderHeldError(f"{_who(runs, command, holder)} is at work; wait for it, or use --if-busy wait")
        if not is_told:
            Lines(sys.stderr).write(f"{_who(runs, command, holder)} is at work: waiting for it to end")
            is_told = True
        time.sleep(POLL_SECONDS)
    held = FolderLease(runs, command)
    try:
        yield held
    finally:
        held.stop()


def file_of(command: str) -> str:
    return f"{command}.json"


def _other_holder(runs: Store, command: str) -> Holder | None:
    holder = _read(runs, command)
    if holder is None:
        return None
    state = process_liveness(runs, holder.host, holder.pid, holder.process, holder.updated)
    return holder if state == "alive" else None


def _read(runs: Store, command: str) -> Holder | None:
    """Return the folder's holder, or None if its file is absent or damaged."""
    try:
        return read_model(runs, file_of(command), Holder)
    except RunError:
        return None


def _who(runs: Store, command: str, holder: Holder) -> str:
    process = f"process {holder.pid} on {holder.host}, since {date(holder.started)}"
    return f"another `swiftbatch {command}` on {runs.shown_uri} ({process})"
