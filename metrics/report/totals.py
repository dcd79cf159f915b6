"""All jobs of a report, added up one by one: it needs few bytes for each, for there may be a million."""

from __future__ import annotations

from array import array
from collections import Counter
from heapq import heappush, heappushpop
from typing import NamedTuple

import numpy as np

from swiftbatch.metrics.report.attempts import DRAFTS, Attempt, JobFacts, Outcome, State
from swiftbatch.metrics.report.intervals import Stretches, rows_of

MAX_BARS = 4000  # of attempts, on a page
MAX_STRETCHES = 2_000_000  # 48 bytes each
MIN_STRETCHES = 2  # of an attempt, however many jobs there are


class LongAttempt(NamedTuple):
    """An attempt that may have a bar on the page, and whose it is."""

    seconds: float
    order: int  # that of the first is the greatest, so that no two are compared further
    attempt: Attempt
    job_name: str
    job_number: int


class Tally:
    """The sums of all jobs so far, the times of all attempts, the stretches of these, and the longest ones."""

    def __init__(self, num_jobs: int) -> None:
        """`num_jobs` are those that will come: among many, an attempt's stretches are few."""
        self.states: Counter[State] = Counter()
        self.num_prompt_tokens = self.num_tokens = 0
        self.num_tokens_by_draft = dict.fromkeys(DRAFTS, 0)
        self.num_cut_thoughts = self.most_cut_tokens = 0  # and the greatest limit at which one was cut
        self.outcomes: Counter[Outcome] = Counter()
        self.num_recovered_tokens = self.num_recomputed_tokens = 0
        self.workers: set[tuple[int, str]] = set()  # drivers' numbers, and names
        self.starts, self.ends, self.losses = array("d"), array("d"), array("d")  # of attempts; ends of the lost ones
        self.longest: list[LongAttempt] = []
        self._most_stretches = max(MIN_STRETCHES, MAX_STRETCHES // max(1, num_jobs))
        self._numbers = array("d")

    @property
    def num_jobs(self) -> int:
        return self.states.total()

    def add(self, job: JobFacts) -> None:
        """Take a job in, with all that is known of it."""
        self.states[job.state] += 1
        self.num_prompt_tokens += job.num_prompt_tokens
        self.num_tokens += job.num_tokens
        for kind, count in zip(DRAFTS, job.num_tokens_by_draft or (), strict=False):
            self.num_tokens_by_draft[kind] += count
        if job.is_cut_thought:
            self.num_cut_thoughts += 1
            self.most_cut_tokens = max(self.most_cut_tokens, job.max_tokens)
        for attempt in job.attempts:
            self._add_attempt(job, attempt)
        for row in rows_of(job, self._most_stretches):
            self._numbers.extend(row)

    def stretches(self) -> Stretches:
        """The stretches of all attempts that drew tokens."""
        start, end, tokens, length, drafts, accepted = np.frombuffer(self._numbers, np.float64).reshape(-1, 6).T
        return Stretches(start, end, tokens, length, drafts, accepted)

    def covered_seconds(self) -> float:
        """Seconds in which at least one attempt was under way."""
        if not self.starts:
            return 0.0
        order = np.argsort(self.starts)
        starts, ends = np.array(self.starts)[order], np.array(self.ends)[order]
        last = np.concatenate([[-np.inf], np.maximum.accumulate(ends)[:-1]])
        return float(np.maximum(0.0, ends - np.maximum(starts, last)).sum())

    def _add_attempt(self, job: JobFacts, attempt: Attempt) -> None:
        self.outcomes[attempt.outcome] += 1
        self.starts.append(attempt.start)
        self.ends.append(attempt.end)
        if attempt.outcome == "lost":
            self.losses.append(attempt.end)
        self.workers.add((attempt.driver, attempt.worker_id))
        if attempt.resume is not None:
            self.num_recovered_tokens += attempt.resume.num_recovered_tokens
            self.num_recomputed_tokens += attempt.resume.num_recomputed_tokens
        seconds = attempt.end - attempt.start
        if len(self.longest) < MAX_BARS:
            heappush(self.longest, LongAttempt(seconds, -len(self.starts), attempt, job.name, job.number))
        elif seconds > self.longest[0].seconds:
            heappushpop(self.longest, LongAttempt(seconds, -len(self.starts), attempt, job.name, job.number))
