"""The events at the end of a run; see `events.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from swiftbatch.scheduler.display.events import Event
from swiftbatch.scheduler.display.summary import counted, job_counts, printable


@dataclass(frozen=True)
class LimitReached(Event):
    """The run is to stop at its `limit`, a text for people: its workers, if there are any, write their checkpoints."""

    text: ClassVar[str] = "stopping at {limit}: nothing is lost"
    limit: str


@dataclass(frozen=True)
class ShardWritten(Event):
    """The shard at `path` in the run folder is whole, with `num_rows` rows, and will not change any more."""

    path: str
    num_rows: int

    def __str__(self) -> str:
        return f"shard {printable(self.path)} is there: {counted(self.num_rows, 'row')}"


@dataclass(frozen=True)
class RunEnded(Event):
    """The command is about to end: how the run stands, jobs by state, where the results are, the limit it reached."""

    run: str
    state: str
    jobs: dict[str, int]
    outputs: tuple[str, str]
    limit: str | None = None
    exit_code: int = 0
    num_tokens: int = 0

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        first, run = f"run {self.state}; jobs: {job_counts(self.jobs)}", printable(self.run)
        if self.limit is not None:
            stopped = f"stopped at {printable(self.limit)}"
            return [first, f"{stopped}; to go on, with larger limits or none: swiftbatch resume {run}"]
        if self.state == "interrupted":
            return [first, f"nothing is lost; go on with: swiftbatch resume {run}"]
        again = f"to run failed and cancelled jobs again: swiftbatch resume {run} --retry-failed"
        has_failed = self.jobs.get("failed") or self.jobs.get("cancelled")
        return [first, *([again] if has_failed else []), f"results: {' and '.join(map(printable, self.outputs))}"]


@dataclass(frozen=True)
class WebhookFailed(Event):
    """A message to `receiver` (scheme and host alone) was not taken. Told once; later ones that fail are not."""

    text: ClassVar[str] = "webhook {receiver}: not delivered, {reason}; the run is none the worse for it"
    is_error: ClassVar[bool] = True
    receiver: str
    reason: str
