"""A run's recent tokens per second, and the duration of workers' steps."""

from __future__ import annotations

import time
from collections import deque

DECAY = 0.99  # weight of a report after each newer one
JOB_SHARE = 0.6  # prior share of a step's time that grows with its jobs
DOUBT = 4.0  # variance of job numbers at which reports weigh as much as the prior

RATE_SECONDS = 20.0  # the speed covers this time


def monotonic() -> float:
    return time.monotonic()


class Speed:
    """Recent tokens per second; `now` is in `time.monotonic()` seconds."""

    def __init__(self, now: float) -> None:
        self._samples: deque[tuple[float, int]] = deque([(now, 0)])

    def add(self, num_tokens: int, now: float) -> None:
        self._samples.append((now, self._samples[-1][1] + num_tokens))
        while len(self._samples) > 2 and self._samples[1][0] < now - RATE_SECONDS:
            self._samples.popleft()

    def tokens_per_second(self, now: float) -> float:
        first, last = self._samples[0], self._samples[-1]
        return (last[1] - first[1]) / max(now - first[0], 1e-3)


class StepPace:
    """A linear fit to workers' reports: seconds per token as a function of the number of jobs on a worker."""

    def __init__(self) -> None:
        self._weight = self._num_jobs = self._seconds = self._num_jobs_squared = self._product = 0.0

    def add(self, num_jobs: float, num_tokens: int, seconds: float) -> None:
        """Add a report: `num_jobs` jobs at a time drew `num_tokens` tokens in total within `seconds`."""
        if not num_jobs or not num_tokens:
            return
        per_token = num_jobs * seconds / num_tokens
        sums = (self._weight, self._num_jobs, self._seconds, self._num_jobs_squared, self._product)
        news = (1.0, num_jobs, per_token, num_jobs**2, num_jobs * per_token)
        (self._weight, self._num_jobs, self._seconds, self._num_jobs_squared, self._product) = (
            DECAY * total + new for total, new in zip(sums, news, strict=True)
        )

    def seconds_per_token(self, num_jobs: int) -> float:
        """Return a job's seconds per token on a worker with `num_jobs` jobs, or 0.0 without reports."""
        if not self._weight:
            return 0.0
        mean_jobs, mean_seconds = self._num_jobs / self._weight, self._seconds / self._weight
        spread = self._num_jobs_squared / self._weight - mean_jobs**2
        together = self._product / self._weight - mean_jobs * mean_seconds
        slope = (together + DOUBT * JOB_SHARE * mean_seconds / mean_jobs) / (spread + DOUBT)
        least = (1 - JOB_SHARE) / 2 * mean_seconds
        return max(least, mean_seconds + max(0.0, slope) * (num_jobs - mean_jobs))
