"""Learns how long a step of a worker takes, by the number of its jobs, from the reports of a run."""

from __future__ import annotations

FORGETTING = 0.99  # what a report still counts when the next one has come
JOB_SHARE = 0.6  # of a step's time, that is by its jobs: believed before steps with other numbers of jobs were seen
DOUBT = 4.0  # the spread of numbers of jobs, squared, at which what was seen counts as much as what was believed


class StepPace:
    """A line through seconds per token of one job, over the number of jobs that share the steps."""

    def __init__(self) -> None:
        self._weight = self._num_jobs = self._seconds = self._num_jobs_squared = self._product = 0.0

    def add(self, num_jobs: int, num_tokens: int, seconds: float) -> None:
        """Learn from a report: so many jobs drew so many tokens altogether."""
        if not num_jobs or not num_tokens:
            return
        per_token = num_jobs * seconds / num_tokens
        sums = (self._weight, self._num_jobs, self._seconds, self._num_jobs_squared, self._product)
        news = (1.0, num_jobs, per_token, num_jobs**2, num_jobs * per_token)
        (self._weight, self._num_jobs, self._seconds, self._num_jobs_squared, self._product) = (
            FORGETTING * total + new for total, new in zip(sums, news, strict=True)
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
