"""`status --watch`: shows a run until no driver is at work, from the run folder alone.

One small file is read a second (on an object store every few seconds), however many jobs the run has.
"""

from __future__ import annotations

import time

from swiftbatch.jobs.run.run import Progress, Run
from swiftbatch.scheduler.display.display import Display
from swiftbatch.scheduler.display.events import DriverAwaited, DriverSilent
from swiftbatch.scheduler.driver.backlog import count_jobs
from swiftbatch.scheduler.driver.heartbeat import beat_seconds, current_progress, liveness, with_counts


def watch(run: Run, display: Display) -> Progress:
    """Show each of the driver's beats until there are no more; returns how the run stands then.

    A run that is made and has never had a driver is waited for. A driver on another host that has not been heard of may
    come back, or another one take over: it is waited for, too.
    """
    is_awaited, was_silent = _is_awaited(run, display), False
    while (state := liveness(run, progress := run.progress())) != "gone" or (progress is None and is_awaited):
        if progress is not None:
            display.update(progress if progress.jobs else with_counts(run, progress))
            if state == "silent" and not was_silent:
                display.note(DriverSilent(progress.driver_host, progress.driver_pid, progress.updated))
        was_silent = state == "silent"
        time.sleep(beat_seconds(run.store))
    progress = current_progress(run)
    display.update(progress)
    return progress


def silent_driver(run: Run) -> DriverSilent | None:
    """The event that a driver is silent: it may be stopped or cut off. None if there is none, or it is heard of."""
    progress = run.progress()
    if progress is None or liveness(run, progress) != "silent":
        return None
    return DriverSilent(progress.driver_host, progress.driver_pid, progress.updated)


def _is_awaited(run: Run, display: Display) -> bool:
    """Return whether the run is yet to get its first driver: `submit` takes some seconds until then."""
    if run.has_had_a_driver() or not count_jobs(run)["pending"]:
        return False
    display.note(DriverAwaited(run.store.shown_uri))
    return True
