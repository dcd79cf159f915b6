"""Cancels a run or a job, expires jobs, and stops the process that works on a run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.jobs.run.output_line import error_line
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunError
from swiftbatch.scheduler.driver.queue_loading import count_jobs, write_cancelled
from swiftbatch.scheduler.driver.run_lease import STALE_SECONDS, RunLease, RunTakenError, has_begun, liveness
from swiftbatch.scheduler.driver.shard_writing import finish_shards
from swiftbatch.scheduler.process.process_id import is_gone, is_of_this_machine

POLL_SECONDS = 0.1
EXPIRED = "batch_expired"  # OpenAI's error code of a job that did not end in time
EXPIRED_MESSAGE = "This request could not be executed before the completion window expired."


def stop_driver(run: Run) -> None:
    """End the run's driver on this machine: it saves all tokens first, and the call waits for its end.

    Raises RunError if the driver is on another machine.
    """
    progress = run.progress()
    if progress is None or liveness(run, progress) == "gone":
        return
    if not is_of_this_machine(progress.driver_host, progress.driver_process):
        who = f"process {progress.driver_pid} on {progress.driver_host}"
        raise RunError(f"{who} works on the run at {run.store.shown_uri}: send it SIGTERM there, or cancel the run")
    os.kill(progress.driver_pid, signal.SIGTERM)
    while not is_gone(progress.driver_host, progress.driver_pid, progress.driver_process):
        time.sleep(POLL_SECONDS)


def find_jobs(run: Run, custom_id: str) -> list[JobEntry]:
    """Return the jobs of a `custom_id`, one per choice. Raises RunError."""
    index = run.job_index()
    if found := [index.entry(int(row)) for row in index.rows_of("custom_id", [custom_id])]:
        return found
    raise RunError(f"no job {custom_id!r} in the run at {run.store.shown_uri}; its jobs are in jobs.parquet")


def cancel_jobs(run: Run, custom_id: str | None) -> str:
    """Cancel one job or all; return a line for the user. Raises RunError, StoreError."""
    chosen = None if custom_id is None else find_jobs(run, custom_id)
    unfinished = _unfinished(run, chosen)
    if not unfinished:
        return "nothing to cancel: it has ended already"
    what = f"{len(unfinished)} jobs" if custom_id is None else f"job {custom_id}"
    while True:
        try:
            # a driver that returns after a long silence must not continue cancelled jobs
            with RunLease(run, may_take_over=True) as hold:
                _cancel(run, hold, chosen, is_whole_run=custom_id is None)
            return f"cancelled {what}"
        except RunTakenError:
            if _is_asked(run, [None] if custom_id is None else [record.job_id for record in unfinished]):
                return f"asked the driver to cancel {what}"


def _cancel(run: Run, hold: RunLease, chosen: Sequence[JobEntry] | None, *, is_whole_run: bool) -> None:
    unfinished = _unfinished(run, chosen)
    run.set_damaged_aside([record.job_id for record in unfinished])  # such as a folder in an error's place
    write_cancelled(run, unfinished)
    is_end = not count_jobs(run)["pending"]
    finish_shards(run, hold.epoch, is_end)
    run.write_output(hold.epoch.check)
    if not is_end:
        hold.end("interrupted")
    else:
        hold.end("cancelled" if is_whole_run else "finished")


def _is_asked(run: Run, job_ids: Sequence[str | None]) -> bool:
    """Return whether a driver received the request; False if the driver ended before it could cancel."""
    last = time.monotonic() + STALE_SECONDS
    while not has_begun(run) and time.monotonic() < last:
        time.sleep(POLL_SECONDS)  # a new driver forgets earlier requests
    for job_id in job_ids:
        run.request_cancel(job_id)
    progress = run.progress()
    return progress is not None and liveness(run, progress) == "alive"


def _unfinished(run: Run, chosen: Sequence[JobEntry] | None) -> list[JobEntry]:
    finished, failed = run.ended()
    entries = run.job_index().entries() if chosen is None else chosen
    return [entry for entry in entries if entry.job_id not in finished and entry.job_id not in failed]


def expire_jobs(run: Run) -> None:
    """Give all unfinished jobs an error. Raises RunTakenError, RunError, StoreError."""
    with RunLease(run, may_take_over=True) as hold:
        unfinished = _unfinished(run, None)
        run.set_damaged_aside([record.job_id for record in unfinished])
        for record in unfinished:
            run.write_error(record.job_id, error_line(record, EXPIRED, EXPIRED_MESSAGE))
        run.write_output(hold.epoch.check)
        hold.end("finished")
