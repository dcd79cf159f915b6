"""The driver's sign of life in the run folder, and how others read it."""

from __future__ import annotations

import os
import socket
import time
from collections import deque

from jobs.run import Progress, Run, RunError, WorkerStatus
from jobs.status import RunState
from scheduler.backlog import count_jobs

BEAT_SECONDS = 1.0
STALE_SECONDS = 15.0  # a running driver whose newest beat is older than this is taken for dead
RATE_SECONDS = 20.0  # tokens/s are of this last stretch of time


class RunTakenError(RunError):
    """Another driver runs this run."""


class Speed:
    """Tokens per second over the last stretch of time."""

    def __init__(self, now: float) -> None:
        self._samples: deque[tuple[float, int]] = deque([(now, 0)])

    def add(self, num_tokens: int, now: float) -> None:
        """Count tokens that were generated since the last call."""
        self._samples.append((now, self._samples[-1][1] + num_tokens))
        while len(self._samples) > 2 and self._samples[1][0] < now - RATE_SECONDS:
            self._samples.popleft()

    def tokens_per_second(self, now: float) -> float:
        """The speed now; 0.0 before anything was counted."""
        first, last = self._samples[0], self._samples[-1]
        return (last[1] - first[1]) / max(now - first[0], 1e-3)


class Heartbeat:
    """Writes `progress.json`, and notices when another driver has taken the run over."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._host = socket.gethostname()
        self._started = time.time()
        self._next_beat = 0.0

    def is_due(self, now: float) -> bool:
        """Whether a beat's time has passed since the last one (`now` in `time.monotonic()` seconds)."""
        if now < self._next_beat:
            return False
        self._next_beat = now + BEAT_SECONDS
        return True

    def beat(
        self,
        state: RunState,
        jobs: dict[str, int],
        num_generated_tokens: int,
        num_tokens_left: int,
        tokens_per_second: float,
        workers: tuple[WorkerStatus, ...],
    ) -> Progress:
        """Write one beat and return it. Raises RunTakenError if a later driver has taken the run."""
        self._give_way_to_a_later_driver()
        eta = num_tokens_left / tokens_per_second if tokens_per_second > 0 else None
        progress = Progress(
            state=state,
            updated=time.time(),
            started=self._started,
            jobs=jobs,
            num_generated_tokens=num_generated_tokens,
            tokens_per_second=round(tokens_per_second, 2),
            eta_seconds=None if eta is None else round(eta, 1),
            workers=workers,
            driver_host=self._host,
            driver_pid=os.getpid(),
        )
        self._run.write_progress(progress)
        return progress

    def _give_way_to_a_later_driver(self) -> None:
        other = self._run.progress()
        if other is None or (other.driver_host, other.driver_pid) == (self._host, os.getpid()):
            return
        if other.started > self._started:
            raise RunTakenError(f"the run at {self._run.store.shown_uri} was taken over by another driver; stopping")


def refuse_if_taken(run: Run) -> None:
    """Raise RunTakenError while another driver's beat is fresh."""
    progress = run.progress()
    if progress is not None and is_alive(progress):
        raise RunTakenError(
            f"the run at {run.store.shown_uri} is run by another driver (process {progress.driver_pid} "
            f"on {progress.driver_host}); wait for it, or stop it with `swiftbatch cancel`"
        )


def is_alive(progress: Progress) -> bool:
    """Whether the driver that wrote this beat still runs the run."""
    if progress.state != "running" or time.time() - progress.updated > STALE_SECONDS:
        return False
    return progress.driver_host != socket.gethostname() or _process_exists(progress.driver_pid)


def current_progress(run: Run) -> Progress:
    """What `status` shows: the newest beat, or what the folder says where no driver is alive."""
    progress = run.progress()
    if progress is not None and (progress.state != "running" or is_alive(progress)):
        return progress
    created = run.manifest.created
    return Progress(
        state="interrupted",
        updated=created if progress is None else progress.updated,
        started=created if progress is None else progress.started,
        jobs=count_jobs(run),
        num_generated_tokens=0 if progress is None else progress.num_generated_tokens,
        tokens_per_second=0.0,
        eta_seconds=None,
        workers=(),
        driver_host="" if progress is None else progress.driver_host,
        driver_pid=0 if progress is None else progress.driver_pid,
    )


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
