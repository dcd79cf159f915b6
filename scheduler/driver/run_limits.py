"""A run's limits (time, tokens, worker time) and what it has used."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swiftbatch.jobs.run.run_records import Progress

HOUR = 3600.0


def steady_seconds() -> float:
    """Return seconds on a clock that no change of the system's time affects."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def monotonic() -> float:
    return time.monotonic()  # looked up at each call, so that a test can set the clock


@dataclass(frozen=True)
class Deadline:
    """A time since the epoch; a deadline given as a duration ignores changes of the system's time."""

    moment: float
    steady_moment: float | None = None  # in `steady_seconds`, for a duration

    def seconds_left(self) -> float:
        return self.moment - time.time() if self.steady_moment is None else self.steady_moment - steady_seconds()

    def has_passed(self) -> bool:
        return self.seconds_left() <= 0


@dataclass
class Spending:
    """The tokens and worker time of all drivers and attempts."""

    num_tokens: int = 0  # lost and regenerated ones included
    worker_seconds: float = 0.0  # from each worker's readiness to its end

    @classmethod
    def so_far(cls, last: Progress | None, num_generated_tokens: int) -> Spending:
        if last is None:
            return cls(num_generated_tokens)
        num_untold = max(0, num_generated_tokens - last.num_generated_tokens)
        return cls(last.num_total_tokens + num_untold, last.worker_seconds)


@dataclass(frozen=True)
class Limits:
    """A run's limits; None means no limit."""

    deadline: Deadline | None = None
    max_total_tokens: int | None = None
    max_worker_hours: float | None = None

    def reached(self, spent: Spending) -> str | None:
        """Describe the reached limits for people, or return None if no limit is reached."""
        found = []
        if self.deadline is not None and self.deadline.has_passed():
            moment = datetime.fromtimestamp(self.deadline.moment).astimezone().isoformat(" ", "seconds")
            found.append(f"--deadline {moment}")
        if self.max_total_tokens is not None and spent.num_tokens >= self.max_total_tokens:
            found.append(f"--max-total-tokens {self.max_total_tokens:,} ({spent.num_tokens:,} were generated)")
        if self.max_worker_hours is not None and spent.worker_seconds >= self.max_worker_hours * HOUR:
            found.append(f"--max-worker-hours {self.max_worker_hours:g} ({spent.worker_seconds / HOUR:.4g} were used)")
        return " and ".join(found) or None
