"""A clock that stands still while this process does: stopped (Ctrl-Z), asleep with its machine, busy with itself."""

from __future__ import annotations

import time

LONGEST_TICK = 2.0


class AwakeClock:
    """Measures how long others were silent while this process listened. Look at it several times a second."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._seconds = 0.0

    def now(self) -> float:
        """Seconds since the clock was made; of each time in which nobody looked, at most two are counted."""
        last, self._last = self._last, time.monotonic()
        self._seconds += min(self._last - last, LONGEST_TICK)
        return self._seconds
