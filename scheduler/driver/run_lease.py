"""Decides which driver holds a run: heartbeats, claims of epochs, takeover, and the lease a command keeps alive."""

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
from typing import Any, Literal, Self

from swiftbatch.jobs.run.output_line import num_completion_tokens
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import DriverClaim, ProcessKey, Progress, RunError, RunState, pretty, read_model
from swiftbatch.jobs.storage.store import Store, StoreError
from swiftbatch.metrics.report.page_text import date
from swiftbatch.scheduler.driver.queue_loading import count_jobs
from swiftbatch.scheduler.driver.run_limits import monotonic
from swiftbatch.scheduler.process.process_id import is_gone, own_key
from swiftbatch.scheduler.process.signals import unheard

BEAT_SECONDS = 1.0
BEAT_SECONDS_OBJECT_STORE = 5.0  # each heartbeat there costs money and time
LONGEST_BEAT_SECONDS = 5.0  # with any number of workers, since a driver counts as dead after three times this
STALE_SECONDS = 15.0  # a driver with an older heartbeat may be dead
STALE_SECONDS_OBJECT_STORE = 30.0

AT_REST: dict[str, Any] = {"tokens_per_second": 0.0, "eta_seconds": None, "workers": ()}  # fields of the heartbeat
KEPT = (  # fields kept from a dead driver's heartbeat
    *("driver_host", "driver_pid", "driver_process", "epoch", "started", "updated"),
    *("running", "num_generated_tokens", "num_total_tokens", "worker_seconds", "price_per_worker_hour"),
    *("reached_limit", "num_rejects"),
)

Liveness = Literal["alive", "silent", "gone"]


def beat_seconds(store: Store) -> float:
    return BEAT_SECONDS if store.is_local else BEAT_SECONDS_OBJECT_STORE


def liveness(run: Run, progress: Progress | None) -> Liveness:
    """Return whether the heartbeat's driver is at work; `silent` means that it may be."""
    if progress is None or progress.state != "running":
        return "gone"
    return process_liveness(
        run.store, progress.driver_host, progress.driver_pid, progress.driver_process, progress.updated
    )


def process_liveness(store: Store, host: str, pid: int, key: ProcessKey | None, updated: float) -> Liveness:
    """Return whether a process is at work; `updated` is the time of its newest heartbeat."""
    if is_gone(host, pid, key):
        return "gone"
    limit = STALE_SECONDS if store.is_local else STALE_SECONDS_OBJECT_STORE
    return "alive" if abs(time.time() - updated) <= limit else "silent"


def current_progress(run: Run) -> Progress:
    """Return the newest heartbeat; if no driver is at work, its job counts come from the folder."""
    progress = run.progress()
    if progress is None:
        return _without_beat(run)
    if liveness(run, progress) == "alive":
        return progress if progress.jobs else with_counts(run, progress)
    if progress.state == "running":
        return stopped(progress, "interrupted", count_jobs(run)).model_copy(update={"running": {}})
    jobs = count_jobs(run)  # a result may be late or damaged
    state: RunState = "interrupted" if jobs["pending"] else progress.state
    return progress if jobs == progress.jobs else stopped(progress, state, jobs)


def with_counts(run: Run, progress: Progress) -> Progress:
    return progress.model_copy(update={"jobs": count_jobs(run)})


def stopped(progress: Progress, state: RunState, jobs: dict[str, int]) -> Progress:
    """Return a dead driver's heartbeat with the present state and job counts."""
    kept = {name: getattr(progress, name) for name in KEPT}
    return Progress(state=state, jobs=jobs, **kept, **AT_REST)


def _without_beat(run: Run) -> Progress:
    created, jobs, was_run = run.manifest.created, count_jobs(run), run.has_had_a_driver()
    lines = run.result_lines(run.ended()[0]) if was_run else ()
    return Progress(
        state="interrupted" if jobs["pending"] or not was_run else "finished",
        updated=created,
        started=created,
        jobs=jobs,
        num_generated_tokens=sum(num_completion_tokens(line) for line in lines if line is not None),
        driver_host="",
        driver_pid=0,
        **AT_REST,
    )


# Claims of epochs, of which the newest driver's counts.


CLAIMS_FOLDER = "drivers"
MAX_CLAIMS = 20
LONGEST_PAUSE_SECONDS = 1.0  # between two claims, drawn anew for each


class RunTakenError(RunError):
    """Another driver holds this run."""


class LeaseEpoch:
    """One driver's hold on a run, until a later driver claims the next epoch."""

    def __init__(self, run: Run, number: int, claim: DriverClaim) -> None:
        self.run = run
        self.number = number
        self.claim = claim

    @classmethod
    def begin(cls, run: Run, may_take_over: bool = False) -> LeaseEpoch:
        """Claim the next epoch of a run that nobody holds (see `refuse_if_taken`). Of several claims at once, one wins.

        The run need not exist yet. Raises RunTakenError, StoreError.
        """
        claim = DriverClaim(
            host=socket.gethostname(),
            pid=os.getpid(),
            process=own_key(),
            driver_id=secrets.token_hex(8),
            started=time.time(),
        )
        for _ in range(MAX_CLAIMS):
            number = _newest(run) + 1
            refuse_if_taken(run, may_take_over)
            if run.store.write_new(_path(number), pretty(claim)):
                epoch = cls(run, number, claim)
                epoch.check()
                return epoch
            time.sleep(random.uniform(0, LONGEST_PAUSE_SECONDS))
        raise RunTakenError(f"the run at {run.store.shown_uri} is wanted by several commands at once; try again")

    def through(self, run: Run) -> LeaseEpoch:
        """Return the same hold, with the connection of `run` to the store."""
        return LeaseEpoch(run, self.number, self.claim)

    def check(self) -> None:
        """Raise RunTakenError if another driver has taken the run since, or its folder has gone."""
        newest = _newest(self.run)
        if newest < self.number:  # a write from now on would make another folder
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
    """Raise RunTakenError if another driver may be at work; with `may_take_over`, only if it certainly is."""
    state, who = _holder(run)
    if state == "gone" or (state == "silent" and may_take_over):
        return
    if state == "alive":
        hint = "wait for it, or end it with Ctrl-C or `kill`, which save all tokens"
    else:
        hint = "if that driver is surely dead or cut off, add --takeover; should it come back, it will stop by itself"
    raise RunTakenError(f"the run at {run.store.shown_uri} is held by another driver, {who}; {hint}")


def has_begun(run: Run) -> bool:
    """Return whether the newest driver has written a heartbeat; from then on it accepts requests to cancel."""
    progress = run.progress()
    return progress is not None and progress.epoch >= _newest(run)


def _holder(run: Run) -> tuple[Liveness, str]:
    """Return the newest driver's liveness and name; a driver without a heartbeat has just claimed the run."""
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


def _read_claim(run: Run, number: int) -> DriverClaim | None:
    """Read a claim; return None if it is absent or damaged, though its number still counts."""
    try:
        return read_model(run.store, _path(number), DriverClaim)
    except RunError:
        return None


def _newest(run: Run) -> int:
    numbers = (name.removesuffix(".json") for name in run.store.list(CLAIMS_FOLDER))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _path(epoch: int) -> str:
    return f"{CLAIMS_FOLDER}/{epoch:04d}.json"


# A command's hold on a run, from before the command's first change in the run folder until after its last change.


KNOWN = ("running", "num_generated_tokens", "num_total_tokens", "worker_seconds")  # fields of the last driver's beat


class RunLease:
    """The hold on one run, until its block ends."""

    def __init__(
        self,
        run: Run,
        may_take_over: bool = False,
        forgets_cancel: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Claim the run as `LeaseEpoch.begin` does; with `forgets_cancel`, earlier requests to cancel are dropped.

        The run need not exist yet. Raises RunTakenError, StoreError.
        """
        self._clock = clock
        self._run = run  # the thread needs its own: a command that ends does not wait for a driver's long retries
        self.epoch = LeaseEpoch.begin(run, may_take_over)
        run.delete_leftovers()
        if forgets_cancel:
            run.clear_cancel()  # before others see who is to be asked
        self.before = run.progress()  # nothing is counted yet; what the last driver knew stays known
        self.price_per_worker_hour = None if self.before is None else self.before.price_per_worker_hour
        known = {} if self.before is None else {name: getattr(self.before, name) for name in KNOWN}
        self.beat(state="running", jobs={}, **{"num_generated_tokens": 0} | known, **AT_REST)
        self._begin_beating()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.stop_beating()
        if self._newest.state == "running":
            with contextlib.suppress(StoreError, RunError):  # the error that brought us here matters more
                self.end("interrupted")

    def go_on_through(self, run: Run) -> None:
        """Use the connection of `run` to the store from now on."""
        self.epoch = self.epoch.through(run)

    def is_due(self, now: float, news_seconds: float = 0.0) -> bool:
        """Return whether the next heartbeat is due at `now`, a time on the hold's clock.

        If there is news only every `news_seconds`, heartbeats come no more often, except those that others wait for.
        """
        seconds = max(beat_seconds(self.epoch.run.store), min(news_seconds, LONGEST_BEAT_SECONDS))
        return now >= self._last_beat + seconds

    def beat(self, **figures: Any) -> Progress:
        """Write a heartbeat with these figures, named as in `Progress`, and return it. Raises StoreError."""
        claim, run = self.epoch.claim, self.epoch.run
        self._last_beat = self._clock()
        beat = Progress(
            updated=time.time(),
            started=claim.started,
            driver_host=claim.host,
            driver_pid=claim.pid,
            driver_process=claim.process,
            epoch=self.epoch.number,
            price_per_worker_hour=self.price_per_worker_hour,
            **figures,
        )
        run.write_progress(beat)
        self._newest = beat
        return beat

    def end(self, state: RunState, num_tokens: int | None = None, reached_limit: str | None = None) -> None:
        """Write a last heartbeat with the run's state: no driver is at work any more. Raises RunTakenError, StoreError.

        `num_tokens` is the number of tokens of all jobs, or None if they were not counted.
        """
        self.stop_beating()
        self.epoch.check()
        run = self.epoch.run
        changes: dict[str, Any] = {"num_rejects": len(run.rejects()), "reached_limit": reached_limit}
        changes |= {"updated": time.time(), "price_per_worker_hour": self.price_per_worker_hour}
        changes |= {} if num_tokens is None else {"num_generated_tokens": num_tokens}
        newest = stopped(self._newest.model_copy(update=changes), state, count_jobs(run))
        run.write_progress(newest)
        self._newest = newest

    def stop_beating(self) -> None:
        """Leave the heartbeat to the driver's loop."""
        self._ended.set()
        self._thread.join()

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Write heartbeats in the background until the block ends."""
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
            with contextlib.suppress(StoreError, RunError):  # the next beat comes soon; who goes on checks the epoch
                epoch.check()
                self._run.write_progress(self._newest.model_copy(update={"updated": time.time()}))
