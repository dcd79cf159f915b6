"""Decides which driver holds a run: epochs, takeover and lease."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import DriverClaim, Progress, RunError, RunState, pretty, read_model
from swiftbatch.jobs.storage.store import StoreError
from swiftbatch.metrics.report.page_text import date
from swiftbatch.scheduler.driver.driver_heartbeat import (
    AT_REST,
    LONGEST_BEAT_SECONDS,
    Liveness,
    beat_seconds,
    liveness,
    process_liveness,
    stopped,
)
from swiftbatch.scheduler.driver.queue_loading import count_jobs
from swiftbatch.scheduler.driver.throughput import monotonic
from swiftbatch.scheduler.process.process_id import own_key
from swiftbatch.scheduler.process.signals import unheard

CLAIMS_FOLDER = "drivers"
MAX_BIDS = 20
LONGEST_PAUSE_SECONDS = 1.0  # between two bids, drawn at random


class RunTakenError(RunError):
    """Another driver holds this run."""


class LeaseEpoch:
    """A driver's hold on a run until another claims the next epoch."""

    def __init__(self, run: Run, number: int, claim: DriverClaim) -> None:
        self.run = run
        self.number = number
        self.claim = claim

    @classmethod
    def begin(cls, run: Run, may_take_over: bool = False) -> LeaseEpoch:
        """Claim the next epoch of a free run; only one of several gets it.

        The run need not exist yet. Raises RunTakenError, StoreError.
        """
        claim = DriverClaim(
            host=socket.gethostname(),
            pid=os.getpid(),
            process=own_key(),
            driver_id=secrets.token_hex(8),
            started=time.time(),
        )
        for _ in range(MAX_BIDS):
            number = _newest(run) + 1
            refuse_if_taken(run, may_take_over)
            if _claim(run, number, claim):
                epoch = cls(run, number, claim)
                epoch.check()
                return epoch
            time.sleep(random.uniform(0, LONGEST_PAUSE_SECONDS))
        raise RunTakenError(f"the run at {run.store.shown_uri} is wanted by several commands at once; try again")

    def through(self, run: Run) -> LeaseEpoch:
        """Return this hold through another store."""
        return LeaseEpoch(run, self.number, self.claim)

    def check(self) -> None:
        """Raise RunTakenError if the run was taken or is gone."""
        newest = _newest(self.run)
        if newest < self.number:  # a later write would recreate the folder
            raise RunTakenError(
                f"the run at {self.run.store.shown_uri} is no longer there: {_path(self.number)} has gone with its "
                "folder; this driver stops; where the folder was moved, go on with `swiftbatch resume` there"
            )
        holder = _read_claim(self.run, newest)
        if holder is None and newest == self.number:
            return
        if holder is not None and holder.driver_id == self.claim.driver_id:
            return
        who = "another driver" if holder is None else f"process {holder.pid} on {holder.host}"
        since = "" if holder is None else f" at {date(holder.started)}"
        raise RunTakenError(
            f"the run at {self.run.store.shown_uri} was taken over by {who}{since}; "
            "this driver stops and leaves the run to it"
        )


def claims(run: Run) -> list[DriverClaim]:
    found = (_read_claim(run, number) for number in range(1, _newest(run) + 1))
    return [claim for claim in found if claim is not None]


def refuse_if_taken(run: Run, may_take_over: bool = False) -> None:
    """Raise RunTakenError if another driver may be at work; with `may_take_over` if it surely is."""
    state, who = _holder(run)
    if state == "gone" or (state == "silent" and may_take_over):
        return
    if state == "alive":
        hint = "wait for it, or stop it with `swiftbatch cancel`"
    else:
        hint = "if that driver is surely dead or cut off, add --takeover; should it come back, it will stop by itself"
    raise RunTakenError(f"the run at {run.store.shown_uri} is held by another driver, {who}; {hint}")


def has_begun(run: Run) -> bool:
    """Return whether the newest driver has a heartbeat, and so takes requests."""
    progress = run.progress()
    return progress is not None and progress.epoch >= _newest(run)


def _holder(run: Run) -> tuple[Liveness, str]:
    """Return the newest driver's liveness and description."""
    newest, progress = _newest(run), run.progress()
    if progress is not None and progress.epoch >= newest:
        return liveness(run, progress), _who(progress.driver_host, progress.driver_pid, progress)
    if newest == 0:
        return "gone", ""
    claim = _read_claim(run, newest)
    if claim is None:
        return "silent", f"of whom nothing is known but the damaged {_path(newest)}"
    state = process_liveness(run.store, claim.host, claim.pid, claim.process, claim.started)
    return state, _who(claim.host, claim.pid, claim)


def _who(host: str, pid: int, sign: Progress | DriverClaim) -> str:
    age = time.time() - (sign.updated if isinstance(sign, Progress) else sign.started)
    heard = f"last heard of {age:.0f} s ago" if age >= 0 else "whose clock is ahead of ours"
    return f"process {pid} on {host}, since {date(sign.started)}, {heard}"


def _claim(run: Run, number: int, claim: DriverClaim) -> bool:
    """Write a claim to an epoch; return False if another's may exist.

    Object stores list reliably: of two who bid and then list, at most one sees itself alone.
    """
    if run.store.is_local:
        return run.store.write_new(_path(number), pretty(claim))
    bid = f"{number:04d}.{claim.driver_id}.bid"
    run.store.write(f"{CLAIMS_FOLDER}/{bid}", pretty(claim.model_copy(update={"started": time.time()})))
    try:
        others = [name for name in run.store.list(CLAIMS_FOLDER) if name.startswith(f"{number:04d}.") and name != bid]
        if not all(_is_stale_bid(run, f"{CLAIMS_FOLDER}/{name}") for name in others):
            return False
        return run.store.write_new(_path(number), pretty(claim))
    finally:
        run.store.delete(f"{CLAIMS_FOLDER}/{bid}")


def _is_stale_bid(run: Run, path: str) -> bool:
    """Delete a bid of a killed driver."""
    if not path.endswith(".bid"):
        return False
    bid = _read(run, path)
    if bid is not None and process_liveness(run.store, bid.host, bid.pid, bid.process, bid.started) == "alive":
        return False
    run.store.delete(path)
    return True


def _read_claim(run: Run, number: int) -> DriverClaim | None:
    return _read(run, _path(number))


def _read(run: Run, path: str) -> DriverClaim | None:
    """Return None if absent or damaged."""
    try:
        return read_model(run.store, path, DriverClaim)
    except RunError:
        return None


def _newest(run: Run) -> int:
    numbers = (name.removesuffix(".json") for name in run.store.list(CLAIMS_FOLDER))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _path(epoch: int) -> str:
    return f"{CLAIMS_FOLDER}/{epoch:04d}.json"


# A command's hold on a run, from its first change there to its last.


# fields of the last driver's heartbeat
KNOWN = ("running", "num_generated_tokens", "num_total_tokens", "worker_seconds")


class RunLease:
    """The hold on one run until its block ends."""

    def __init__(
        self,
        run: Run,
        may_take_over: bool = False,
        forgets_cancel: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Claim the run; `forgets_cancel` lets cancelled jobs run again.

        The run need not exist yet. Raises RunTakenError, StoreError.
        """
        self._clock = clock
        self._run = run  # for the thread, so that an ending command need not wait for long retries
        self.epoch = LeaseEpoch.begin(run, may_take_over)
        run.delete_leftovers()
        if forgets_cancel:
            run.clear_cancel()  # before others see whom to ask
        self.before = run.progress()  # keeps what the last driver knew until jobs are counted
        known = {} if self.before is None else {name: getattr(self.before, name) for name in KNOWN}
        self.beat(state="running", jobs={}, **{"num_generated_tokens": 0} | known, **AT_REST)
        self._begin_beating()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.stop_beating()
        if self._newest.state == "running":
            with contextlib.suppress(StoreError, RunError):  # the original error matters more
                self.end("interrupted")

    def go_on_through(self, run: Run) -> None:
        self.epoch = self.epoch.through(run)

    def is_due(self, now: float, news_seconds: float = 0.0) -> bool:
        """Return whether a heartbeat is due; `news_seconds` may stretch the interval."""
        seconds = max(beat_seconds(self.epoch.run.store), min(news_seconds, LONGEST_BEAT_SECONDS))
        return now >= self._last_beat + seconds

    def beat(self, **figures: Any) -> Progress:
        """Write and return a heartbeat with these fields. Raises StoreError."""
        claim, run = self.epoch.claim, self.epoch.run
        self._last_beat = self._clock()
        beat = Progress(
            updated=time.time(),
            started=claim.started,
            driver_host=claim.host,
            driver_pid=claim.pid,
            driver_process=claim.process,
            epoch=self.epoch.number,
            **figures,
        )
        run.write_progress(beat)
        self._newest = beat
        return beat

    def end(self, state: RunState, num_tokens: int | None = None, reached_limit: str | None = None) -> None:
        """Write the final heartbeat. Raises RunTakenError, StoreError."""
        self.stop_beating()
        self.epoch.check()
        run = self.epoch.run
        changes: dict[str, Any] = {"num_rejects": len(run.rejects()), "reached_limit": reached_limit}
        changes |= {"updated": time.time()} | ({} if num_tokens is None else {"num_generated_tokens": num_tokens})
        newest = stopped(self._newest.model_copy(update=changes), state, count_jobs(run))
        run.write_progress(newest)
        self._newest = newest

    def stop_beating(self) -> None:
        self._ended.set()
        self._thread.join()

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Renew the heartbeat within the block."""
        self._begin_beating()
        try:
            yield
        finally:
            self.stop_beating()

    def _begin_beating(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_young, name="run-hold", daemon=True)
        with unheard():
            self._thread.start()

    def _keep_young(self) -> None:
        epoch = self.epoch.through(self._run)
        while not self._ended.wait(beat_seconds(self._run.store)):
            with contextlib.suppress(StoreError, RunError):  # the next heartbeat comes soon, and others check the epoch
                epoch.check()
                self._run.write_progress(self._newest.model_copy(update={"updated": time.time()}))
