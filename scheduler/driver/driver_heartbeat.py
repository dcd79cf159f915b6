"""The driver's heartbeat in the run folder, and how others read it."""

from __future__ import annotations

import time
from typing import Any, Literal

from swiftbatch.jobs.run.output_line_parsing import num_completion_tokens
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import ProcessKey, Progress, RunState
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.driver.queue_loading import count_jobs
from swiftbatch.scheduler.process.process_id import is_gone

BEAT_SECONDS = 1.0
BEAT_SECONDS_OBJECT_STORE = 5.0  # each heartbeat there costs money and time
LONGEST_BEAT_SECONDS = 5.0  # with any number of workers, since a driver counts as dead after three times this
STALE_SECONDS = 15.0  # a driver with an older heartbeat may be dead
STALE_SECONDS_OBJECT_STORE = 30.0

AT_REST: dict[str, Any] = {"tokens_per_second": 0.0, "eta_seconds": None, "workers": ()}  # fields of the heartbeat
KEPT = (  # fields kept from a dead driver's heartbeat
    *("driver_host", "driver_pid", "driver_process", "epoch", "started", "updated"),
    *("running", "num_generated_tokens", "num_total_tokens", "worker_seconds", "reached_limit", "num_rejects"),
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
