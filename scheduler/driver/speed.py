"""Tokens per second over the last stretch of time."""

from __future__ import annotations

import time
from collections import deque

RATE_SECONDS = 20.0  # tokens/s are of this last stretch of time


def monotonic() -> float:
    """The clock of drivers, where no other is given."""
    return time.monotonic()


class Speed:
    """Tokens per second over the last stretch of time; `now` is in `time.monotonic()` seconds throughout."""

    def __init__(self, now: float) -> None:
        self._samples: deque[tuple[float, int]] = deque([(now, 0)])

    def add(self, num_tokens: int, now: float) -> None:
        """Count tokens that were generated since the last call."""
        self._samples.append((now, self._samples[-1][1] + num_tokens))
        while len(self._samples) > 2 and self._samples[1][0] < now - RATE_SECONDS:
            self._samples.popleft()

    def tokens_per_second(self, now: float) -> float:
        """The speed now; 0.0 before anything was counted."""
        first, last = self._samples[0], self._samples[-1]
        return (last[1] - first[1]) / max(now - first[0], 1e-3)
