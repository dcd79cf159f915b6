"""A command's hold on a run: from before the first change that it makes there to after the last.

The heartbeat says so: the driver's loop writes it, and while that is not at work yet, or no more, a thread keeps it
young, so that other commands see who is at work, and ask it to cancel jobs where they would else do so themselves.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from swiftbatch.jobs.run.run import Run, RunError
from swiftbatch.jobs.run.run_records import Progress, RunState
from swiftbatch.jobs.storage.store import StoreError
from swiftbatch.scheduler.driver.driver_heartbeat import AT_REST, LONGEST_BEAT_SECONDS, beat_seconds, stopped
from swiftbatch.scheduler.driver.queue_loading import count_jobs
from swiftbatch.scheduler.driver.takeover import Epoch
from swiftbatch.scheduler.driver.throughput import monotonic
from swiftbatch.scheduler.process.signals import unheard

KNOWN = ("running", "num_generated_tokens", "num_total_tokens", "worker_seconds")  # fields of the last driver's beat


class Hold:
    """The hold on one run, until its block ends."""

    def __init__(
        self,
        run: Run,
        may_take_over: bool = False,
        forgets_cancel: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Claim the run as `Epoch.begin` does; with `forgets_cancel`, jobs cancelled before may run.

        The run need not be there yet. Raises RunTakenError, StoreError.
        """
        self._clock = clock
        self._run = run  # for the thread: a command that ends does not wait for a driver's long retries
        self.epoch = Epoch.begin(run, may_take_over)
        run.delete_leftovers()
        if forgets_cancel:
            run.clear_cancel()  # before others see who is to be asked
        self.before = run.progress()  # nothing is counted yet; what the last driver knew stays known
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
        """Take another way to the run's store from now on."""
        self.epoch = self.epoch.through(run)

    def is_due(self, now: float, news_seconds: float = 0.0) -> bool:
        """Return whether a beat's time has passed since the last one (`now` on the hold's clock).

        Where there is news every `news_seconds` alone, beats come no more often, but for those that others wait for.
        """
        seconds = max(beat_seconds(self.epoch.run.store), min(news_seconds, LONGEST_BEAT_SECONDS))
        return now >= self._last_beat + seconds

    def beat(self, **figures: Any) -> Progress:
        """Write a beat with these figures, by the names of `Progress`, and return it. Raises StoreError."""
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
        """Say that nobody is at work any more, and how the run stands. Raises RunTakenError, StoreError.

        `num_tokens` are those of all jobs, where they were counted.
        """
        self.stop_beating()
        self.epoch.check()
        run = self.epoch.run
        changes: dict[str, Any] = {"num_rejects": len(run.rejects()), "reached_limit": reached_limit}
        changes |= {"updated": time.time()} | ({} if num_tokens is None else {"num_generated_tokens": num_tokens})
        newest = stopped(self._newest.model_copy(update=changes), state, count_jobs(run))
        run.write_progress(newest)
        self._newest = newest

    def stop_beating(self) -> None:
        """Leave the heartbeat to the driver's loop."""
        self._ended.set()
        self._thread.join()

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Keep the heartbeat young within the block."""
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
