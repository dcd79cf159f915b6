"""Watches a run through its folder: its progress, and a job's text so far."""

from __future__ import annotations

import time
from collections.abc import Iterator

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.token_log import PackedLogs, TokenLog
from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.jobs.run.output_line import shown_text
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import Progress, RunError
from swiftbatch.jobs.storage.retries import Retries
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.display.display import Display
from swiftbatch.scheduler.display.events import DriverAwaited, DriverSilent
from swiftbatch.scheduler.driver.queue_loading import count_jobs
from swiftbatch.scheduler.driver.run_lease import beat_seconds, current_progress, liveness, with_counts
from swiftbatch.scheduler.runs.cancellation import find_jobs
from swiftbatch.worker.config import CheckpointSettings

POLL_SECONDS = 1.0
TAKEN_BACK = "\n[a loop was taken back, this is in its place:]\n"


def patient(run: Run) -> Run:
    """Return the run with a store that retries as long as a driver's does."""
    return Run(Store(run.store.uri, Retries(CheckpointSettings.store_retry_seconds)), run.manifest)


def watch(run: Run, display: Display) -> Progress:
    """Show heartbeats until no driver works; return the final progress.

    The watch waits for a first driver, and for a silent driver on another host.
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
    progress = run.progress()
    if progress is None or liveness(run, progress) != "silent":
        return None
    return DriverSilent(progress.driver_host, progress.driver_pid, progress.updated)


def _is_awaited(run: Run, display: Display) -> bool:
    if run.has_had_a_driver() or not count_jobs(run)["pending"]:
        return False
    display.note(DriverAwaited(run.store.shown_uri))
    return True


def follow_text(run: Run, custom_id: str, follow: bool, choice: int = 0) -> Iterator[str]:
    """Yield a job's text so far; with `follow` until it ends.

    Raises RunError for an unknown job, ModelError without the tokenizer.
    """
    from swiftbatch.worker.model.model_files import locate_model
    from swiftbatch.worker.text.tokenizer import TextCodec

    record = find_choice(run, custom_id, choice)
    checkpoints, packed = CheckpointStore.of(run), PackedLogs.of(run)
    settled = TextCodec(locate_model(run.manifest.stored_model, is_whole=False)).output_text.settled
    shown = ""
    while True:
        # checked before the text is read, to miss nothing that is written in between
        goes_on = follow and current_progress(run).state == "running" and run.error(record.job_id) is None
        text = _result_text(run, record.job_id)
        is_whole = text is not None
        if text is None:
            text = settled(newest_log(run, checkpoints, packed, record).token_ids.tolist())
        num_common = _num_common(shown, text)
        is_taken_back = num_common < min(len(shown), len(text))
        yield (TAKEN_BACK if is_taken_back else "") + text[num_common:]
        shown = text if num_common < len(text) else shown
        if is_whole or not goes_on:
            return
        time.sleep(POLL_SECONDS)


def newest_log(run: Run, checkpoints: CheckpointStore, packed: PackedLogs, job: JobEntry) -> TokenLog:
    """Return a job's newest log, from its own folder or from a worker's packed file."""
    progress = current_progress(run)
    holders = [worker.id for worker in progress.workers if job.name in worker.jobs]
    running = packed.read(holders if progress.state == "running" else None).get(job.job_id)
    own = checkpoints.read_log(job.job_id)
    return running.log if running is not None and running.log.progress > own.progress else own


def _num_common(shown: str, text: str) -> int:
    differing = (i for i, (one, other) in enumerate(zip(shown, text, strict=False)) if one != other)
    return len(shown) if text.startswith(shown) else next(differing, len(text))


def find_choice(run: Run, custom_id: str, choice: int) -> JobEntry:
    records = find_jobs(run, custom_id)
    for record in records:
        if record.choice_index == choice:
            return record
    raise RunError(f"no choice {choice} of job {custom_id!r}: expected one of its {len(records)}, counted from 0")


def _result_text(run: Run, job_id: str) -> str | None:
    line = run.result(job_id)
    if line is None:
        return None
    choice = line["response"]["body"]["choices"][0]
    return shown_text(choice)
