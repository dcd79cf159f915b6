"""Limits for a run: until when, how many tokens, how long its workers; and what it has used so far."""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swiftbatch.jobs.run.run_records import Progress

HOUR = 3600.0
UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}
AMOUNT = r"[0-9]+(?:\.[0-9]+)?"  # "\d" is a digit of any script
DURATION = re.compile("".join(f"(?:({AMOUNT}){unit})?" for unit in UNITS))
TIME_OF_DAY = re.compile(r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?")
EXPECTED_DEADLINE = (
    "expected a duration as 90m or 1d12h, a time of the day as 06:30, or a date and time as 2030-01-31T06:30"
)


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


def parse_deadline(text: str, now: float) -> Deadline:
    """The moment that is meant; `now` is in seconds since the epoch. Raises ValueError.

    A duration counts from `now`; a time of the day is the next one; what names no zone is in the local one.
    """
    try:
        if (seconds := _duration(text.strip())) is not None:
            until = datetime.fromtimestamp(now, UTC) + timedelta(seconds=seconds)
            return Deadline(until.timestamp(), steady_seconds() + seconds)
        return Deadline(_moment(text.strip(), now))
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"found {text!a}, {EXPECTED_DEADLINE}") from None


def _duration(text: str) -> float | None:
    """The seconds of a duration; None for another text."""
    if not text or (found := DURATION.fullmatch(text)) is None:
        return None
    amounts = dict(zip(UNITS.values(), found.groups(), strict=True))
    return timedelta(**{unit: float(amount) for unit, amount in amounts.items() if amount}).total_seconds()


def _moment(text: str, now: float) -> float:
    if TIME_OF_DAY.fullmatch(text):
        hour, minute, *rest = map(int, text.split(":"))
        today = datetime.fromtimestamp(now).replace(hour=hour, minute=minute, second=0, microsecond=0)
        days = [today.replace(second=rest[0] if rest else 0) + timedelta(days=days) for days in (0, 1)]
        return min(moment for day in days for moment in _shown(day) if moment > now)
    said = datetime.fromisoformat(text)
    moments = [said.timestamp()] if said.tzinfo else _shown(said)
    return next((moment for moment in moments if moment > now), moments[0])


def _shown(local: datetime) -> list[float]:
    """The moments when the local clock shows a time: two where it is set back, the jump where it is set past it."""
    first, second = sorted(local.replace(fold=fold).timestamp() for fold in (0, 1))
    if datetime.fromtimestamp(first) == local:
        return [first] if first == second else [first, second]
    seconds = range(int(first), int(second) + 1)
    return [seconds[bisect_left(seconds, local, key=datetime.fromtimestamp)]]
