"""Finds and drops what a run keeps of jobs that have ended, so that `extend` can take them on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs
from swiftbatch.jobs.checkpoints.packed_logs import CHECKPOINTS, WORKERS
from swiftbatch.jobs.run.checked_reading import NUM_READERS
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunState
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.display.summary import counted
from swiftbatch.scheduler.driver.backlog import count_jobs
from swiftbatch.scheduler.driver.hold import Hold


@dataclass(frozen=True)
class Kept:
    """Token logs and states of jobs that have ended: the bytes of each, by job id."""

    logs: dict[str, int]
    states: dict[str, int]

    def __str__(self) -> str:
        return ", ".join(
            f"{counted(len(sizes), what)} ({sum(sizes.values()):,} bytes)"
            for sizes, what in ((self.logs, "token log"), (self.states, "job state"))
            if sizes
        )


def kept_of(run: Run) -> Kept:
    """Find what is kept. A checkpoint of a job that may still go on by itself is no part of it. Raises StoreError."""
    found = set(run.store.list(CHECKPOINTS)) - {WORKERS}
    if found:  # failed and cancelled jobs may be run again, from their checkpoints
        found -= set(run.job_ids()) - run.ended()[0]
    with ThreadPoolExecutor(NUM_READERS) as pool:
        states = dict(zip(sorted(found), pool.map(lambda job_id: _size(run.store, job_id), sorted(found)), strict=True))
    return Kept(KeptLogs.of(run).sizes(), states)


def prune(run: Run, *, logs: bool, state: bool) -> str:
    """Drop kept token logs, states or both; returns a line for the user. Raises RunTakenError, StoreError."""
    before = run.progress()
    with Hold(run) as hold:
        kept = kept_of(run)
        dropped = Kept(kept.logs if logs else {}, kept.states if state else {})
        if logs:
            KeptLogs.of(run).clear()
        for job_id in dropped.states:
            run.store.delete_folder(f"{CHECKPOINTS}/{job_id}")
        ended: RunState = before.state if before and before.state in ("finished", "cancelled") else "finished"
        hold.end("interrupted" if count_jobs(run)["pending"] else ended)
    num_bytes = sum(dropped.logs.values()) + sum(dropped.states.values())
    return f"freed {num_bytes:,} bytes: {dropped}" if num_bytes else "nothing to drop: 0 bytes freed"


def _size(store: Store, job_id: str) -> int:
    """The bytes of all checkpoints of a job."""
    folders = [f"{CHECKPOINTS}/{job_id}/{attempt}" for attempt in store.list(f"{CHECKPOINTS}/{job_id}")]
    return sum(size or 0 for folder in folders for size in store.sizes(folder).values())
