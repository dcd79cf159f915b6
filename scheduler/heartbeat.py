"""The driver's sign of life in the run folder, and how others read it."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from typing import Literal

from jobs.run import Progress, Run, WorkerStatus
from jobs.status import DriverClaim, RunState
from scheduler.backlog import count_jobs
from scheduler.job_queue import JobQueue

BEAT_SECONDS = 1.0
BEAT_SECONDS_OBJECT_STORE = 5.0  # where each beat costs money and time
STALE_SECONDS = 15.0  # a running driver whose newest beat is older than this may be dead
STALE_SECONDS_OBJECT_STORE = 30.0
RATE_SECONDS = 20.0  # tokens/s are of this last stretch of time

Liveness = Literal["alive", "silent", "gone"]


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
    """Writes `progress.json` for the driver that holds the run by the claim number `epoch`."""

    def __init__(self, run: Run, epoch: int, claim: DriverClaim) -> None:
        self._run = run
        self._epoch = epoch
        self._claim = claim
        self._seconds = BEAT_SECONDS if run.store.is_local else BEAT_SECONDS_OBJECT_STORE
        self._next_beat = 0.0

    def is_due(self, now: float) -> bool:
        """Whether a beat's time has passed since the last one (`now` in `time.monotonic()` seconds)."""
        return now >= self._next_beat

    def beat(
        self, state: RunState, queue: JobQueue, running: dict[str, int], speed: float, workers: tuple[WorkerStatus, ...]
    ) -> Progress:
        """Write one beat and return it; `running` as in `Progress`, `speed` in tokens per second."""
        self._next_beat = time.monotonic() + self._seconds
        progress = Progress(
            state=state,
            updated=time.time(),
            started=self._claim.started,
            jobs=queue.counts(),
            running=running,
            num_generated_tokens=queue.num_generated_tokens,
            tokens_per_second=round(speed, 2),
            eta_seconds=round(queue.num_tokens_left / speed, 1) if speed > 0 else None,
            workers=workers,
            driver_host=self._claim.host,
            driver_pid=self._claim.pid,
            epoch=self._epoch,
        )
        self._run.write_progress(progress)
        return progress


def liveness(run: Run, progress: Progress | None) -> Liveness:
    """Whether the driver that wrote this beat is at work: silent are those that may be, but have not been heard of."""
    if progress is None or progress.state != "running":
        return "gone"
    if progress.driver_host == socket.gethostname() and not _process_exists(progress.driver_pid):
        return "gone"
    limit = STALE_SECONDS if run.store.is_local else STALE_SECONDS_OBJECT_STORE
    return "alive" if abs(time.time() - progress.updated) <= limit else "silent"


def current_progress(run: Run) -> Progress:
    """What `status` shows: the newest beat, or what the folder says where no driver is alive."""
    progress = run.progress()
    if progress is not None and (progress.state != "running" or liveness(run, progress) == "alive"):
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
        epoch=0 if progress is None else progress.epoch,
    )


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
