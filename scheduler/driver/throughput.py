"""The speed of a run: tokens per second over the last stretch of time, and how long workers' steps take."""

from __future__ import annotations

import time
from collections import deque

DECAY = 0.99  # what a report still counts when the next one has come
JOB_SHARE = 0.6  # of a step's time, that is by its jobs: believed before steps with other numbers of jobs were seen
DOUBT = 4.0  # the spread of numbers of jobs, squared, at which what was seen counts as much as what was believed

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


class StepPace:
    """Learns how long a worker's step takes, by the number of its jobs, from the reports of a run.

    It is a line through seconds per token of one job, over the number of jobs that share the steps.
    """

    def __init__(self) -> None:
        self._weight = self._num_jobs = self._seconds = self._num_jobs_squared = self._product = 0.0

    def add(self, num_jobs: float, num_tokens: int, seconds: float) -> None:
        """Learn from a report: so many jobs at a time drew so many tokens altogether."""
        if not num_jobs or not num_tokens:
            return
        per_token = num_jobs * seconds / num_tokens
        sums = (self._weight, self._num_jobs, self._seconds, self._num_jobs_squared, self._product)
        news = (1.0, num_jobs, per_token, num_jobs**2, num_jobs * per_token)
        (self._weight, self._num_jobs, self._seconds, self._num_jobs_squared, self._product) = (
            DECAY * total + new for total, new in zip(sums, news, strict=True)
        )

    def seconds_per_token(self, num_jobs: int) -> float:
        """The seconds that a job of so many on one worker takes for a token; 0.0 before the first report."""
        if not self._weight:
            return 0.0
        mean_jobs, mean_seconds = self._num_jobs / self._weight, self._seconds / self._weight
        spread = self._num_jobs_squared / self._weight - mean_jobs**2
        together = self._product / self._weight - mean_jobs * mean_seconds
        slope = (together + DOUBT * JOB_SHARE * mean_seconds / mean_jobs) / (spread + DOUBT)
        least = (1 - JOB_SHARE) / 2 * mean_seconds
        return max(least, mean_seconds + max(0.0, slope) * (num_jobs - mean_jobs))
