"""Limits for a run: until when, how many tokens, how long its workers; and what it has used so far."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swiftbatch.jobs.run.run_records import Progress

HOUR = 3600.0


def steady_seconds() -> float:
    """Seconds on a clock that nobody sets; on Linux it counts on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass(frozen=True)
class Deadline:
    """A moment in seconds since the epoch. That of a duration does not move when somebody sets the clock."""

    moment: float
    steady_moment: float | None = None  # the same in `steady_seconds`, for a duration

    def seconds_left(self) -> float:
        """Seconds until then, fewer than 0 behind it."""
        return self.moment - time.time() if self.steady_moment is None else self.steady_moment - steady_seconds()

    def has_passed(self) -> bool:
        return self.seconds_left() <= 0


@dataclass
class Spending:
    """The tokens and worker time that a run has used, over all its drivers and all attempts at its jobs."""

    num_tokens: int = 0  # generated, those that were lost and generated once more included
    worker_seconds: float = 0.0  # the time that started workers were held

    @classmethod
    def so_far(cls, last: Progress | None, num_generated_tokens: int) -> Spending:
        """Read the last driver's newest beat, and add the tokens that its workers have brought since.

        `num_generated_tokens` are those that the jobs have now; a driver that was killed had not told of the last ones.
        """
        if last is None:
            return cls(num_generated_tokens)
        num_untold = max(0, num_generated_tokens - last.num_generated_tokens)
        return cls(last.num_total_tokens + num_untold, last.worker_seconds)


@dataclass(frozen=True)
class Limits:
    """The limits at which a run stops in good order; None is no limit."""

    deadline: Deadline | None = None
    max_total_tokens: int | None = None
    max_worker_hours: float | None = None

    def reached(self, spent: Spending) -> str | None:
        """Name the limits that are reached, in a text for people; None if none is."""
        found = []
        if self.deadline is not None and self.deadline.has_passed():
            moment = datetime.fromtimestamp(self.deadline.moment).astimezone().isoformat(" ", "seconds")
            found.append(f"--deadline {moment}")
        if self.max_total_tokens is not None and spent.num_tokens >= self.max_total_tokens:
            found.append(f"--max-total-tokens {self.max_total_tokens:,} ({spent.num_tokens:,} were generated)")
        if self.max_worker_hours is not None and spent.worker_seconds >= self.max_worker_hours * HOUR:
            found.append(f"--max-worker-hours {self.max_worker_hours:g} ({spent.worker_seconds / HOUR:.4g} were used)")
        return " and ".join(found) or None
