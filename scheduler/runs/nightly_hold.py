"""Who runs the job files of a folder: one `swiftbatch nightly` at a time.

nightly.json    the holder's newest sign of life, in the folder of the runs; gone when it ends

The clocks of two machines decide here, so two may overlap for a moment. That does no harm: each run has one driver
(see `takeover`). The hold keeps a second one out of the gaps between two runs, and says who is at work since when.
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

from jobs.checkpoints.timeline import Moment
from jobs.run.records import ProcessKey
from jobs.run.run_files import RunError, pretty, read_model
from jobs.storage.store import Store, StoreError
from metrics.report.clock import date
from scheduler.driver.heartbeat import BEAT_SECONDS_OBJECT_STORE, process_liveness
from scheduler.process.identity import own_key
from scheduler.process.streams import Lines

FILE = "nightly.json"
POLL_SECONDS = 2.0


class NightlyHeldError(RunError):
    """Another `swiftbatch nightly` is at work on these runs; the text is one line for the user."""


class Holder(BaseModel):
    """`nightly.json`; times in seconds since the epoch."""

    model_config = ConfigDict(frozen=True)

    holder_id: str
    host: str
    pid: int
    process: ProcessKey | None = None
    started: Moment
    updated: Moment


class Hold:
    """The hold on a folder of runs, renewed by a thread until `stop`."""

    def __init__(self, runs: Store) -> None:
        now = time.time()
        self._runs = runs
        self._holder = Holder(
            holder_id=secrets.token_hex(8),
            host=socket.gethostname(),
            pid=os.getpid(),
            process=own_key(),
            started=now,
            updated=now,
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="nightly-hold", daemon=True)
        self._runs.write(FILE, pretty(self._holder))
        self._thread.start()

    def check(self) -> None:
        """Raise NightlyHeldError if another one has taken over, as it may after a long silence of ours."""
        holder = _read(self._runs)
        if holder is not None and holder.holder_id != self._holder.holder_id:
            who = _who(self._runs, holder)
            raise NightlyHeldError(f"{who} has taken over; this one stops and leaves the rest to it")

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(StoreError, RunError):  # else it is stale soon
            self.check()
            self._runs.delete(FILE)

    def _renew(self) -> None:
        while not self._ended.wait(BEAT_SECONDS_OBJECT_STORE):
            with contextlib.suppress(StoreError, RunError):  # the next beat comes soon; `check` says what is lost
                self.check()
                self._runs.write(FILE, pretty(self._holder.model_copy(update={"updated": time.time()})))


@contextlib.contextmanager
def hold(runs: Store, is_patient: bool) -> Iterator[Hold]:
    """Hold a folder of runs. While another process does, wait for it (`is_patient`) or raise NightlyHeldError."""
    is_told = False
    while (holder := _other_holder(runs)) is not None:
        if not is_patient:
            raise NightlyHeldError(f"{_who(runs, holder)} is at work; wait for it, or use --if-busy wait")
        if not is_told:
            Lines(sys.stderr).write(f"{_who(runs, holder)} is at work: waiting for it to end")
            is_told = True
        time.sleep(POLL_SECONDS)
    held = Hold(runs)
    try:
        yield held
    finally:
        held.stop()


def _other_holder(runs: Store) -> Holder | None:
    holder = _read(runs)
    if holder is None:
        return None
    state = process_liveness(runs, holder.host, holder.pid, holder.process, holder.updated)
    return holder if state == "alive" else None


def _read(runs: Store) -> Holder | None:
    """The newest sign of life; None where it is absent or damaged: the next is written over it."""
    try:
        return read_model(runs, FILE, Holder)
    except RunError:
        return None


def _who(runs: Store, holder: Holder) -> str:
    process = f"process {holder.pid} on {holder.host}, since {date(holder.started)}"
    return f"another `swiftbatch nightly` on {runs.shown_uri} ({process})"
