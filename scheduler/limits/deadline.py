"""The moment when a run is to stop, as a user says it: in so much time, at a time of the day, or at a date."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}
AMOUNT = r"[0-9]+(?:\.[0-9]+)?"  # "\d" is a digit of any script
DURATION = re.compile("".join(f"(?:({AMOUNT}){unit})?" for unit in UNITS))
TIME_OF_DAY = re.compile(r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?")
EXPECTED = "expected a duration as 90m or 1d12h, a time of the day as 06:30, or a date and time as 2030-01-31T06:30"


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
