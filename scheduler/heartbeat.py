"""The driver's sign of life in the run folder, and how others read it."""

from __future__ import annotations

import os
import socket
import time
from typing import Any, Literal

from jobs.run import Progress, Run, WorkerStatus
from jobs.status import DriverClaim, RunState
from jobs.store import Store
from metrics.counters import DriverCounters
from scheduler.backlog import count_jobs
from scheduler.job_queue import JobQueue

BEAT_SECONDS = 1.0
BEAT_SECONDS_OBJECT_STORE = 5.0  # where each beat costs money and time
STALE_SECONDS = 15.0  # a running driver whose newest beat is older than this may be dead
STALE_SECONDS_OBJECT_STORE = 30.0

Liveness = Literal["alive", "silent", "gone"]


class Heartbeat:
    """Writes `progress.json` for the driver that holds the run by the claim number `epoch`."""

    def __init__(self, run: Run, epoch: int, claim: DriverClaim, num_rejects: int = 0) -> None:
        self._run = run
        self._epoch = epoch
        self._claim = claim
        self._num_rejects = num_rejects
        self._seconds = BEAT_SECONDS if run.store.is_local else BEAT_SECONDS_OBJECT_STORE
        self._next_beat = 0.0

    def is_due(self, now: float) -> bool:
        """Whether a beat's time has passed since the last one (`now` in `time.monotonic()` seconds)."""
        return now >= self._next_beat

    def beat(
        self,
        state: RunState,
        queue: JobQueue,
        running: dict[str, int],
        speed: float,
        workers: tuple[WorkerStatus, ...],
        counters: DriverCounters,
    ) -> Progress:
        """Write one beat and return it; `running` as in `Progress`, `speed` in tokens per second."""
        self._next_beat = time.monotonic() + self._seconds
        progress = Progress(
            state=state,
            updated=time.time(),
            started=self._claim.started,
            running=running,
            tokens_per_second=round(speed, 2),
            eta_seconds=round(queue.num_tokens_left / speed, 1) if speed > 0 else None,
            workers=workers,
            num_rejects=self._num_rejects,
            driver_host=self._claim.host,
            driver_pid=self._claim.pid,
            epoch=self._epoch,
            **_queued(queue),
            **_counted(counters),
        )
        self._run.write_progress(progress)
        return progress


def _queued(queue: JobQueue) -> dict[str, Any]:
    return {
        "jobs": queue.counts(),
        "max_tokens": {record.job.custom_id: record.job.sampling.max_tokens for record, _ in queue.running()},
        "num_generated_tokens": queue.num_generated_tokens,
        "num_tokens_left": queue.num_tokens_left,
    }


def _counted(counters: DriverCounters) -> dict[str, Any]:
    totals = counters.totals()
    return {
        "num_starting_workers": counters.workers.get("starting", 0),
        "num_preemptions": counters.num_preemptions,
        "num_resumes": totals.num_resumes,
        "mean_acceptance_length": round(totals.mean_acceptance_length, 3) if totals.num_steps else None,
    }


def liveness(run: Run, progress: Progress | None) -> Liveness:
    """Whether the driver that wrote this beat is at work: silent are those that may be, but have not been heard of."""
    if progress is None or progress.state != "running":
        return "gone"
    return process_liveness(run.store, progress.driver_host, progress.driver_pid, progress.updated)


def process_liveness(store: Store, host: str, pid: int, updated: float) -> Liveness:
    """Whether a process is at work that wrote its newest sign of life to the store at `updated` (time since epoch)."""
    if host == socket.gethostname() and not _process_exists(pid):
        return "gone"
    limit = STALE_SECONDS if store.is_local else STALE_SECONDS_OBJECT_STORE
    return "alive" if abs(time.time() - updated) <= limit else "silent"


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
