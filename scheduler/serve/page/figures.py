"""The figures of a batch, as people read them."""

from __future__ import annotations

from dataclasses import dataclass

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.run.run_records import Progress
from swiftbatch.scheduler.serve.batch_records import EndState, State
from swiftbatch.scheduler.serve.batch_status import unread_status
from swiftbatch.scheduler.serve.batches import Batch
from swiftbatch.scheduler.serve.refusals import RefusedError
from swiftbatch.scheduler.serve.service import Service

STATE_WORDS: dict[State, str] = {"in_progress": "in progress"}  # others are words already
NAME_KEY = "name"  # of a batch's metadata
ENDED: tuple[EndState, ...] = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True)
class Figures:
    """Tokens are those generated so far and, until the batch has ended, at most how many there will be.

    Moments are in seconds since the epoch. `problem` says why a batch does not go on, or could not.
    """

    id: str
    name: str
    state: State
    num_lines: int
    num_completed: int
    num_failed: int
    num_tokens: int
    most_tokens: int
    tokens_per_second: float | None
    eta_seconds: float | None
    created: float
    problem: str

    @property
    def state_words(self) -> str:
        return STATE_WORDS.get(self.state, self.state)

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def can_be_cancelled(self) -> bool:
        return not self.has_ended and self.state != "cancelling"

    @property
    def num_done(self) -> int:
        return self.num_completed + self.num_failed


def figures_of(service: Service, batch: Batch) -> Figures:
    """The figures of a batch; if its folder can't be read just now, that is its problem."""
    try:
        status = service.status(batch)
    except UserError as error:
        status = unread_status(batch, str(service.refusal(error)))
    progress, counts = status.progress, status.counts
    num_tokens = _num_tokens(batch, progress)
    return Figures(
        id=batch.id,
        name=name_of(service, batch),
        state=status.state,
        num_lines=counts.total,
        num_completed=counts.completed,
        num_failed=counts.failed,
        num_tokens=num_tokens,
        most_tokens=num_tokens + (0 if progress is None else progress.num_tokens_left),
        tokens_per_second=_speed(batch, progress),
        eta_seconds=None if progress is None else progress.eta_seconds,
        created=batch.created,
        problem=service.problem(batch, status),
    )


def name_of(service: Service, batch: Batch) -> str:
    """The name that a batch's metadata give it, else that of its file; empty if the file was deleted."""
    if name := (batch.record.metadata or {}).get(NAME_KEY):
        return name
    try:
        return service.files.get(batch.record.input_file_id, batch.owner).filename
    except RefusedError:
        return ""


def _num_tokens(batch: Batch, progress: Progress | None) -> int:
    if batch.ended is not None:
        return batch.ended.num_generated_tokens
    return 0 if progress is None else progress.num_generated_tokens


def _speed(batch: Batch, progress: Progress | None) -> float | None:
    """The speed in tokens per second: of now, or on average for a batch that has ended."""
    if (ended := batch.ended) is not None:
        if ended.in_progress is None or not ended.num_generated_tokens:
            return None
        return ended.num_generated_tokens / max(1.0, ended.finalizing - ended.in_progress)
    return progress.tokens_per_second if progress is not None and progress.state == "running" else None
