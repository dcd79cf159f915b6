"""The completion window of a batch, as a client says it."""

from __future__ import annotations

import re

from swiftbatch.scheduler.serve.refusals import RefusedError

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
WINDOW = re.compile(r"([0-9]{1,6})([smhd])")
LEAST_SECONDS, MOST_SECONDS = 1, 30 * 86400
EXPECTED = "expected a whole number with s, m, h or d behind it, as in 24h, from 1s to 30d"


def window_seconds(text: str) -> int:
    """The time that a batch may take. Raises RefusedError."""
    found = WINDOW.fullmatch(text)
    seconds = int(found[1]) * UNITS[found[2]] if found else 0
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise RefusedError(f"completion_window: found {text[:40]!a}, {EXPECTED}", param="completion_window")
    return seconds
