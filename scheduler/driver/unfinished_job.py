"""A job of a run that is still to do, and where it stands among those that wait."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.jobs.shared_prompts import NOT_SHARED, SharedPrompt
from swiftbatch.scheduler.driver.lengths import Forecast, Place
from swiftbatch.worker.caches.memory.page_counts import Growth

CLASSES_PER_DOUBLING = 4  # of lengths: where the longest job has no room, the first of each shorter class is asked for
PROGRESS_SHARE = 0.01  # an attempt that adds less than this share of max_tokens has made no progress
LEAST_LENGTH = 0.75  # of the longest job that may run: a shorter one never goes first for the sake of its prompt


class Strikes(NamedTuple):
    """Attempts at a job that were lost in a row without progress, and the most tokens that it had had at the last."""

    num: int
    num_tokens: int


@dataclass(eq=False)
class UnfinishedJob:
    entry: JobEntry
    num_generated_tokens: int = 0  # as last reported
    num_tokens_at_last_loss: int = 0  # the most it ever had when an attempt was lost
    priority: int = 0  # the lower one comes first
    prompt: SharedPrompt = NOT_SHARED
    num_strikes: int = 0  # attempts lost in a row without progress
    runs_alone: bool = False
    not_before: float = 0.0
    seniority: int | None = None  # its number among all jobs that workers were given; None before its first attempt
    worker_id: str = ""  # the worker that has it, or had it last
    is_suspect: bool = False  # it may have ended a worker that had it in reserve, and no report will say so
    has_ended: bool = False  # on that worker, which has yet to write its result
    lives_at: Place | None = None  # where it counts among the jobs that workers have and that have not ended
    ticket: int | None = None  # its newest place among the waiting; None while it runs and when it has ended
    length: int = 0  # positions that it is expected to need, by which it waits; 0: as many as it may have

    def __post_init__(self) -> None:
        self.length = self.length or self.entry.max_length

    @property
    def num_left(self) -> int:
        num_left = self.entry.max_tokens - self.num_generated_tokens
        return num_left if num_left > 0 and not self.has_ended else 0  # a driver asks some ten times for each job

    @property
    def has_progressed(self) -> bool:
        """Return whether the job has enough tokens that it had not at its last loss."""
        needed = max(1, int(PROGRESS_SHARE * self.entry.max_tokens))
        return self.num_generated_tokens >= self.num_tokens_at_last_loss + needed

    def strike(self, num_strikes: int, max_attempts: int) -> None:
        """Set its strikes; from two on, or before the last of its attempts, it runs alone."""
        self.num_strikes = num_strikes
        self.runs_alone = num_strikes >= max(1, min(2, max_attempts - 1))

    def num_final_tokens(self, forecast: Forecast) -> int:
        """The tokens that the job is expected to end with."""
        return forecast.final_tokens(self.entry.num_prompt_tokens, self.num_generated_tokens, self.entry.max_tokens)

    def num_expected(self, forecast: Forecast) -> int:
        """The tokens that the job is expected to draw yet."""
        return self.num_final_tokens(forecast) - self.num_generated_tokens

    def growth(self, forecast: Forecast) -> Growth:
        """The positions of the job: its prompt's, and those of the tokens that it has and is expected to have."""
        num_prompt_tokens = self.entry.num_prompt_tokens
        now, end = num_prompt_tokens + self.num_generated_tokens, num_prompt_tokens + self.num_final_tokens(forecast)
        return Growth(now, end, self.prompt.num_tokens)

    @property
    def length_class(self) -> int:
        """A number for jobs of about this length."""
        return length_class(self.length)

    def may_precede(self, first: UnfinishedJob) -> bool:
        """Return whether the job may go before `first`, which comes first, for the sake of its prompt."""
        is_as_long = self.length >= LEAST_LENGTH * first.length
        return is_as_long and self.priority == first.priority


class JobPlace(NamedTuple):
    """The place of a waiting job. Two places never compare by their jobs, since no two tickets are equal."""

    priority: int
    negative_length: int
    line_number: int
    ticket: int
    job: UnfinishedJob


def length_class(length: int) -> int:
    """The number of a class of lengths, the higher for the longer."""
    return int(CLASSES_PER_DOUBLING * math.log2(length))
