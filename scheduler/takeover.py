"""Which driver holds a run. No clock decides it: each driver claims the next epoch, and the newest claim holds.

drivers/<epoch:04d>.json    who claimed the run, written once
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from datetime import UTC, datetime

from jobs.run import Progress, Run, RunError
from jobs.run_files import pretty, read_model
from jobs.status import DriverClaim
from scheduler.heartbeat import liveness

FOLDER = "drivers"


class RunTakenError(RunError):
    """Another driver holds this run."""


class Epoch:
    """One driver's hold on a run, until a later driver claims the next epoch."""

    def __init__(self, run: Run, number: int, claim: DriverClaim) -> None:
        self.run = run
        self.number = number
        self.claim = claim

    @classmethod
    def begin(cls, run: Run) -> Epoch:
        """Claim the next epoch of a run: whoever held it stops at its next beat. Raises RunTakenError, StoreError."""
        claim = DriverClaim(
            host=socket.gethostname(), pid=os.getpid(), driver_id=secrets.token_hex(8), started=time.time()
        )
        number = _newest(run) + 1
        while not run.store.write_new(_path(number), pretty(claim)):
            number += 1
        epoch = cls(run, number, claim)
        epoch.check()  # of two at once on an object store, the later writer wins
        return epoch

    def check(self) -> None:
        """Raise RunTakenError if another driver has taken the run since."""
        newest = _newest(self.run)
        holder = read_model(self.run.store, _path(max(newest, self.number)), DriverClaim)
        if holder is None or holder.driver_id == self.claim.driver_id:
            return
        raise RunTakenError(
            f"the run at {self.run.store.shown_uri} was taken over by process {holder.pid} on {holder.host} at "
            f"{_moment(holder.started)}; this driver stops and leaves the run to it"
        )


def claims(run: Run) -> list[DriverClaim]:
    """Who held the run, oldest first."""
    found = (read_model(run.store, _path(number), DriverClaim) for number in range(1, _newest(run) + 1))
    return [claim for claim in found if claim is not None]


def refuse_if_taken(run: Run, may_take_over: bool = False) -> None:
    """Raise RunTakenError while another driver may be at work; with `may_take_over` only while it surely is."""
    progress = run.progress()
    state = liveness(run, progress)
    if progress is None or state == "gone" or (state == "silent" and may_take_over):
        return
    if state == "alive":
        hint = "wait for it, or stop it with `swiftbatch cancel`"
    else:
        hint = "if that driver is surely dead or cut off, add --takeover; should it come back, it will stop by itself"
    raise RunTakenError(f"the run at {run.store.shown_uri} is held by another driver, {_holder(progress)}; {hint}")


def _holder(progress: Progress) -> str:
    age = time.time() - progress.updated
    heard = f"last heard of {age:.0f} s ago" if age >= 0 else "whose clock is ahead of ours"
    since = _moment(progress.started)
    return f"process {progress.driver_pid} on {progress.driver_host}, since {since}, {heard}"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _newest(run: Run) -> int:
    numbers = (name.removesuffix(".json") for name in run.store.list(FOLDER))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _path(epoch: int) -> str:
    return f"{FOLDER}/{epoch:04d}.json"
