"""A batch's status and its running jobs' texts, from its folder alone."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.token_log import PackedLogs
from swiftbatch.jobs.run.job_index import JobEntry, job_entries
from swiftbatch.jobs.run.job_table import paths
from swiftbatch.jobs.run.run import MANIFEST, REJECTS, Run
from swiftbatch.jobs.run.run_records import Progress
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.driver.run_lease import beat_seconds, current_progress
from swiftbatch.scheduler.serve.records.server_records import Counts, Ended, LineProblem, State
from swiftbatch.scheduler.serve.records.stored_objects import Batch

if TYPE_CHECKING:
    from swiftbatch.worker.text.tokenizer import TextCodec

NO_LINES = Counts()
DAMAGED = "damaged_run"  # code of a batch with an unusable run
UNFINISHED = ("pending", "running")  # states of jobs


@dataclass(frozen=True)
class Status:
    """The status shown to clients; times in seconds since the epoch."""

    state: State
    counts: Counts = NO_LINES
    in_progress: float | None = None
    finalizing: float | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    problems: tuple[LineProblem, ...] = ()
    ended: float | None = None
    progress: Progress | None = None
    model: str | None = None
    num_input_tokens: int | None = None  # None until the end, as the next two
    num_generated_tokens: int = 0
    num_reasoning_tokens: int = 0

    def shown(self, hidden: Callable[[str], str]) -> Status:
        if all(each.line is not None for each in self.problems):
            return self
        problems = [each.model_copy(update={"message": hidden(each.message)}) for each in self.problems]
        return replace(self, problems=tuple(problems))


class Watcher:
    """The newest status of one batch, read at most once per heartbeat."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._lock = threading.Lock()
        self._fresh_seconds = beat_seconds(batch.store)
        self._read = -self._fresh_seconds
        self._newest = Status("validating")
        self._lines: BatchLines | None = None

    def status(self) -> Status:
        """Return the newest status. Raises StoreError, RunError."""
        if self._batch.ended is None:
            with self._lock:
                if not self._is_fresh():
                    self._newest = self._look()
                    self._read = time.monotonic()
        return self._said()

    def remembered(self) -> Status | None:
        """Return the status if nothing must be read."""
        return self._said() if self._is_fresh() else None

    def _is_fresh(self) -> bool:
        return self._batch.ended is not None or time.monotonic() - self._read < self._fresh_seconds

    def _said(self) -> Status:
        if self._batch.ended is not None:
            return _ended_status(self._batch.ended)
        return self._newest if self._batch.cancellation is None else replace(self._newest, state="cancelling")

    def _look(self) -> Status:
        if self._lines is None:
            self._lines = lines_of(self._batch.store)
        return Status("validating") if self._lines is None else running_status(self._batch.store, self._lines)


@dataclass(frozen=True)
class BatchLines:
    """The numbers of an input's good lines, their jobs, and rejects."""

    num_lines: int
    num_jobs: int
    num_rejects: int


def lines_of(store: Store) -> BatchLines | None:
    """Count a batch's lines; None until all were read and checked."""
    if not is_submitted(store):
        return None
    run = Run.open(store.uri)
    return BatchLines(len(run.custom_ids()), len(run.job_ids()), len(run.rejects()))


def is_submitted(store: Store) -> bool:
    """Return whether all good lines are jobs: rejects are written after them."""
    return store.exists(REJECTS) and store.exists(MANIFEST)


def running_status(store: Store, lines: BatchLines) -> Status:
    """Return the status from the run's progress. Raises StoreError, RunError."""
    run = Run.open(store.uri)
    progress = current_progress(run)
    is_over = not any(progress.jobs.get(state) for state in UNFINISHED)
    return Status(
        state="finalizing" if is_over else "in_progress",
        counts=_counts(progress.jobs, lines),
        in_progress=run.manifest.created,
        finalizing=progress.updated if is_over else None,
        progress=progress,
        model=model_id(run.manifest.model),
    )


def model_id(model: str) -> str:
    """Return a model's name for clients: of a file or folder, the last part of its path."""
    is_path = os.path.isabs(model) or os.path.exists(model)
    return os.path.basename(model.rstrip("/")) if is_path else model


def _ended_status(ended: Ended) -> Status:
    same = {field.name for field in fields(Status)} & Ended.model_fields.keys()
    return Status(**{name: getattr(ended, name) for name in same})


def unread_status(batch: Batch, problem: str) -> Status:
    """Return the status of a batch with an unusable run."""
    state: State = "in_progress" if batch.cancellation is None else "cancelling"
    return Status(state, problems=(LineProblem(code=DAMAGED, message=problem),))


def _counts(jobs: dict[str, int], lines: BatchLines) -> Counts:
    """Count lines, or before the end shares of their choices."""
    share = lines.num_lines / max(1, lines.num_jobs)
    num_failed = jobs.get("failed", 0) + jobs.get("cancelled", 0)
    return Counts(
        total=lines.num_lines + lines.num_rejects,
        completed=int(jobs.get("finished", 0) * share),
        failed=int(num_failed * share) + lines.num_rejects,
    )


# Partial texts of running jobs from their token logs.


NUM_KNOWN_RUNS = 8  # names are requested repeatedly


def partial_texts(run: Run, running: Container[str], last_tokens: int | None = None) -> list[dict[str, Any]]:
    """Return line, choice, number of tokens, and text or its end, of jobs named in `running`.

    Raises ModelError, RunError, StoreError.
    """
    checkpoints, packed = CheckpointStore.of(run), PackedLogs.of(run).read()
    texts = []
    for job in (job for job in names_of(run.store) if job.name in running):
        kept = packed[job.job_id].log if job.job_id in packed else checkpoints.read_log(job.job_id)
        token_ids = kept.token_ids.tolist()
        settled = _codec(run.manifest.stored_model).output_text.settled
        num_before = 0 if last_tokens is None else len(settled(token_ids[:-last_tokens]))
        text = settled(token_ids)[num_before:]
        place = {"custom_id": job.custom_id, "index": job.choice_index}
        texts.append(place | {"num_tokens": len(token_ids), "text": text})
    return texts


def names_of(store: Store) -> tuple[JobEntry, ...]:
    """Return a run's jobs. Raises RunError, StoreError."""
    return _names(store.uri, tuple(paths(store)))


@functools.lru_cache(maxsize=NUM_KNOWN_RUNS)
def _names(uri: str, _tables: tuple[str, ...]) -> tuple[JobEntry, ...]:
    return tuple(job_entries(Store(uri)))


@functools.lru_cache(maxsize=2)
def _codec(model: str) -> TextCodec:
    from swiftbatch.worker.model.model_files import locate_model
    from swiftbatch.worker.text.tokenizer import TextCodec

    return TextCodec(locate_model(model, is_whole=False))
