"""A command's hold on a run: from before the first change that it makes there to after the last.

While the driver's loop is not at work yet, or no more, a thread keeps the heartbeat young, so that other commands see
who is at work, and ask it to cancel jobs where they would else do so themselves.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from jobs.run.records import Progress, RunState
from jobs.run.run import Run, RunError
from jobs.storage.store import StoreError
from scheduler.driver.backlog import count_jobs
from scheduler.driver.heartbeat import BEAT_SECONDS, BEAT_SECONDS_OBJECT_STORE, stopped
from scheduler.driver.takeover import Epoch


class Hold:
    """The hold on one run, until its block ends."""

    def __init__(self, run: Run, may_take_over: bool = False, forgets_cancel: bool = False) -> None:
        """Claim the run as `Epoch.begin` does; with `forgets_cancel`, jobs cancelled before may run.

        The run need not be there yet. Raises RunTakenError, StoreError.
        """
        self._run = run  # for the thread: a command that ends does not wait for a driver's long retries
        self.epoch = Epoch.begin(run, may_take_over)
        run.delete_leftovers()
        if forgets_cancel:
            run.clear_cancel()  # before others see who is to be asked
        self._beat = self._first_beat(run.progress())
        run.write_progress(self._beat)
        self._begin_beating()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.stop_beating()
        with contextlib.suppress(StoreError, RunError):  # the error that brought us here matters more
            self.epoch.check()
            newest = self.epoch.run.progress()
            if newest is None or newest.state == "running":
                self.end("interrupted")

    def go_on_through(self, run: Run) -> None:
        """From now on, take another way to the run's store."""
        self.epoch = self.epoch.through(run)

    def end(self, state: RunState) -> None:
        """Say that nobody is at work any more, and how the run stands. Raises RunTakenError, StoreError."""
        self.stop_beating()
        self.epoch.check()
        run = self.epoch.run
        changes = {"updated": time.time(), "num_rejects": len(run.rejects())}
        newest = (run.progress() or self._beat).model_copy(update=changes)
        run.write_progress(stopped(newest, state, count_jobs(run)))

    def stop_beating(self) -> None:
        """Leave the heartbeat to the driver's loop."""
        self._ended.set()
        self._thread.join()

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Keep the heartbeat young within the block."""
        self._beat = self.epoch.run.progress() or self._beat
        self._begin_beating()
        try:
            yield
        finally:
            self.stop_beating()

    def _begin_beating(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_young, name="run-hold", daemon=True)
        self._thread.start()

    def _keep_young(self) -> None:
        seconds = BEAT_SECONDS if self._run.store.is_local else BEAT_SECONDS_OBJECT_STORE
        epoch = self.epoch.through(self._run)
        while not self._ended.wait(seconds):
            with contextlib.suppress(StoreError, RunError):  # the next beat comes soon; who goes on checks the epoch
                epoch.check()
                self._run.write_progress(self._beat.model_copy(update={"updated": time.time()}))

    def _first_beat(self, before: Progress | None) -> Progress:
        """Nothing is counted yet; what the last driver knew of its running jobs stays known."""
        claim = self.epoch.claim
        return Progress(
            state="running",
            updated=time.time(),
            started=claim.started,
            jobs={},
            running={} if before is None else before.running,
            num_generated_tokens=0 if before is None else before.num_generated_tokens,
            tokens_per_second=0.0,
            eta_seconds=None,
            workers=(),
            driver_host=claim.host,
            driver_pid=claim.pid,
            driver_process=claim.process,
            epoch=self.epoch.number,
        )
