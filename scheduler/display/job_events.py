"""The events that happen to a job in a run; see `events.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from swiftbatch.scheduler.display.events import NUM_REJECTS_SHOWN, Event
from swiftbatch.scheduler.display.progress_line import counted, printable


@dataclass(frozen=True)
class JobStarted(Event):
    """A worker has the job from here on; it goes on at `num_tokens`, or at its newest checkpoint before that."""

    custom_id: str
    worker: str
    attempt: int
    num_tokens: int


@dataclass(frozen=True)
class JobFinished(Event):
    """The job's result is in the run folder."""

    custom_id: str
    num_tokens: int


@dataclass(frozen=True)
class JobPutBack(Event):
    """The job is pending again and will resume from its checkpoint: `reason` is a word for programs.

    `num_tokens` are those that it had when it was last heard of. With `is_lost` its attempt broke off, otherwise it was
    ended in good order, with all tokens in the checkpoint.
    """

    custom_id: str
    reason: str
    num_tokens: int
    is_lost: bool

    def __str__(self) -> str:
        if self.is_lost:
            return f"job {printable(self.custom_id)} goes back, to resume from its checkpoint"
        return f"job {printable(self.custom_id)} goes back with its checkpoint ({self.reason})"


@dataclass(frozen=True)
class JobGivenUp(Event):
    """The job has had its attempts: its error is in the run folder, `message` says why."""

    text: ClassVar[str] = "job {custom_id} is {message}"
    is_error: ClassVar[bool] = True
    custom_id: str
    message: str


@dataclass(frozen=True)
class JobCancelled(Event):
    """The user of the job has stopped it."""

    custom_id: str


@dataclass(frozen=True)
class JobsExtended(Event):
    """`extend` has made `num_jobs` jobs longer: they go on from `num_tokens` tokens, and have `max_tokens` at most."""

    num_jobs: int
    num_tokens: int
    max_tokens: int

    def __str__(self) -> str:
        if not self.num_jobs:
            return "nothing new to extend"
        most = f"{self.max_tokens:,} tokens at most"
        return f"{counted(self.num_jobs, 'job')} to go on, {self.num_tokens:,} tokens are there; each has {most}"


@dataclass(frozen=True)
class JobsLongAlready(Event):
    """Named jobs that `extend` has nothing to do for: they may have `max_tokens` or more already."""

    custom_ids: tuple[str, ...]
    max_tokens: int

    def __str__(self) -> str:
        num_more = len(self.custom_ids) - NUM_REJECTS_SHOWN
        names = [printable(name) for name in self.custom_ids[:NUM_REJECTS_SHOWN]]
        more = [f"and {counted(num_more, 'more job')}"] if num_more > 0 else []
        return f"may have {self.max_tokens:,} tokens already: {', '.join([*names, *more])}"


@dataclass(frozen=True)
class JobNotExtended(Event):
    """`extend` leaves a job as it is; it is the `number`th of `num_refused` (from 1)."""

    is_error: ClassVar[bool] = True
    custom_id: str
    reason: str
    number: int
    num_refused: int

    def __str__(self) -> str:
        if self.number > NUM_REJECTS_SHOWN + 1:
            return ""
        if self.number > NUM_REJECTS_SHOWN:
            return f"and {self.num_refused - NUM_REJECTS_SHOWN} more jobs that are not extended"
        return f"not extended: job {printable(self.custom_id)}: {printable(self.reason)}"


@dataclass(frozen=True)
class LineDamaged(Event):
    """A job's result or error can't be used: the job runs again, and the file at `path` is `kept` under another one."""

    text: ClassVar[str] = "{path} is damaged, {problem}: kept as {kept}; a job that has no other result runs again"
    is_error: ClassVar[bool] = True
    path: str
    problem: str
    kept: str
