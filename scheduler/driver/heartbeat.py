"""The driver's sign of life in the run folder, and how others read it."""

from __future__ import annotations

import time
from typing import Any, Literal

from jobs.run.records import DriverClaim, ProcessKey, RunState
from jobs.run.run import Progress, Run, WorkerStatus
from jobs.storage.store import Store
from metrics.counters import DriverCounters
from scheduler.driver.backlog import count_jobs
from scheduler.driver.job_queue import JobQueue
from scheduler.process.identity import is_gone

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
            driver_process=self._claim.process,
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
    return process_liveness(
        run.store, progress.driver_host, progress.driver_pid, progress.driver_process, progress.updated
    )


def process_liveness(store: Store, host: str, pid: int, key: ProcessKey | None, updated: float) -> Liveness:
    """Whether a process is at work that wrote its newest sign of life to the store at `updated` (time since epoch)."""
    if is_gone(host, pid, key):
        return "gone"
    limit = STALE_SECONDS if store.is_local else STALE_SECONDS_OBJECT_STORE
    return "alive" if abs(time.time() - updated) <= limit else "silent"


def current_progress(run: Run) -> Progress:
    """What `status` shows: the newest beat, or what the folder says where no driver is alive, or has yet counted."""
    progress = run.progress()
    if progress is None:
        return _not_yet_run(run)
    if liveness(run, progress) == "alive":
        return progress if progress.jobs else with_counts(run, progress)
    if progress.state == "running":
        return stopped(progress, "interrupted", count_jobs(run)).model_copy(update={"running": {}})
    jobs = count_jobs(run)  # a result may have come late, or be damaged
    state: RunState = "interrupted" if jobs["pending"] else progress.state
    return progress if jobs == progress.jobs else stopped(progress, state, jobs)


def with_counts(run: Run, progress: Progress) -> Progress:
    """The beat of a driver that has yet to count, with the jobs as they are."""
    return progress.model_copy(update={"jobs": count_jobs(run)})


def stopped(progress: Progress, state: RunState, jobs: dict[str, int]) -> Progress:
    """The beat of a driver that is no more, with the run's state and its jobs as they are now."""
    return Progress(
        state=state,
        updated=progress.updated,
        started=progress.started,
        jobs=jobs,
        running=progress.running,
        num_generated_tokens=progress.num_generated_tokens,
        tokens_per_second=0.0,
        eta_seconds=None,
        workers=(),
        num_rejects=progress.num_rejects,
        driver_host=progress.driver_host,
        driver_pid=progress.driver_pid,
        driver_process=progress.driver_process,
        epoch=progress.epoch,
    )


def _not_yet_run(run: Run) -> Progress:
    created = run.manifest.created
    return Progress(
        state="interrupted",
        updated=created,
        started=created,
        jobs=count_jobs(run),
        num_generated_tokens=0,
        tokens_per_second=0.0,
        eta_seconds=None,
        workers=(),
        driver_host="",
        driver_pid=0,
    )
