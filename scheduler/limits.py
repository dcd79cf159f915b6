"""Limits for a run: until when, how many tokens, how long its workers; and what it has used so far."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swiftbatch.jobs.run.run_records import Progress

HOUR = 3600.0
UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}
AMOUNT = r"[0-9]+(?:\.[0-9]+)?"  # "\d" is a digit of any script
DURATION = re.compile("".join(f"(?:({AMOUNT}){unit})?" for unit in UNITS))
TIME_OF_DAY = re.compile(r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?")
EXPECTED = "expected a duration as 90m or 1d12h, a time of the day as 06:30, or a date and time as 2030-01-31T06:30"


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
        return cls(max(last.num_total_tokens + num_untold, num_generated_tokens), last.worker_seconds)


@dataclass(frozen=True)
class Limits:
    """The limits at which a run stops in good order; None is no limit."""

    deadline: float | None = None  # in seconds since the epoch
    max_total_tokens: int | None = None
    max_worker_hours: float | None = None

    def reached(self, spent: Spending, now: float) -> str | None:
        """Name the limits that are reached, in a text for people; None if none is. `now` in seconds since the epoch."""
        found = []
        if self.deadline is not None and now >= self.deadline:
            moment = datetime.fromtimestamp(self.deadline).astimezone().isoformat(" ", "seconds")
            found.append(f"--deadline {moment}")
        if self.max_total_tokens is not None and spent.num_tokens >= self.max_total_tokens:
            found.append(f"--max-total-tokens {self.max_total_tokens:,} ({spent.num_tokens:,} were generated)")
        if self.max_worker_hours is not None and spent.worker_seconds >= self.max_worker_hours * HOUR:
            found.append(f"--max-worker-hours {self.max_worker_hours:g} ({spent.worker_seconds / HOUR:.4g} were used)")
        return " and ".join(found) or None


def parse_deadline(text: str, now: float) -> float:
    """The moment that is meant, in seconds since the epoch, as `now` is. Raises ValueError.

    A duration counts from `now`; a time of the day is the next one; what names no zone is in the local one.
    """
    try:
        moment = _moment(text.strip(), datetime.fromtimestamp(now).astimezone())
        return moment.timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"found {text!a}, {EXPECTED}") from None


def _moment(text: str, now: datetime) -> datetime:
    if text and (duration := DURATION.fullmatch(text)):
        amounts = dict(zip(UNITS.values(), duration.groups(), strict=True))
        return now + timedelta(**{unit: float(amount) for unit, amount in amounts.items() if amount})
    if TIME_OF_DAY.fullmatch(text):
        return _next(text, now)
    return datetime.fromisoformat(text).astimezone()


def _next(text: str, now: datetime) -> datetime:
    """The next moment with this time of the day."""
    hour, minute, *rest = map(int, text.split(":"))
    for days in (0, 1):
        day = now.replace(tzinfo=None) + timedelta(days=days)  # the zone's offset may differ from today's
        moment = day.replace(hour=hour, minute=minute, second=rest[0] if rest else 0, microsecond=0).astimezone()
        if moment > now:
            return moment
    return moment
