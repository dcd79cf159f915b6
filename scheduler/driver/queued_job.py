"""A job of a run that has not ended: its length, its worker, its losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.jobs.shared_prompts import NOT_SHARED, SharedPrompt
from swiftbatch.scheduler.driver.expected_lengths import Forecast, LengthBucket
from swiftbatch.worker.kv.kv_capacity import Growth

CLASSES_PER_DOUBLING = 4  # length classes; if the longest job has no room, each shorter class is tried
PROGRESS_SHARE = 0.01  # share of max_tokens; an attempt that adds less made no progress
LEAST_LENGTH = 0.75  # share of the longest job's length; shorter ones never go first for their prompt


class Strikes(NamedTuple):
    """A job's number of losses without progress, its number of tokens at the last loss, and `QueuedJob.max_group`."""

    num: int
    num_tokens: int
    max_group: int = 1


Turn = tuple[int, int, int, int]
"""The turn of a waiting job, the lowest first: its priority, its negative length, its line, and a ticket of its own."""


@dataclass(eq=False)
class QueuedJob:
    """An unfinished job, with or without a worker."""

    entry: JobEntry
    num_generated_tokens: int = 0  # last reported number
    num_tokens_at_last_loss: int = 0  # the most it had at any loss
    priority: int = 0  # lower comes first
    prompt: SharedPrompt = NOT_SHARED
    num_strikes: int = 0  # losses in a row without progress
    max_group: int = 0  # the most struck jobs on its worker, itself included; 0: it is not struck
    failed_gpus: tuple[str, ...] = ()  # of the worker whose GPU failed under it last
    not_before: float = 0.0
    seniority: int | None = None  # order of first attempts over all jobs; None before
    worker_id: str = ""  # its present or last worker
    is_suspect: bool = False  # it may have killed a worker from the reserve, which no report would show
    has_ended: bool = False  # its worker has not written the result yet
    lives_at: LengthBucket | None = None  # its bucket among unfinished jobs of workers
    turn: Turn | None = None  # its turn while waiting, else None
    length: int = 0  # expected positions, by which it waits; 0: the most it may have

    def __post_init__(self) -> None:
        self.length = self.length or self.entry.max_length

    @property
    def job_id(self) -> str:
        return self.entry.job_id

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def strikes(self) -> Strikes:
        return Strikes(self.num_strikes, self.num_tokens_at_last_loss, self.max_group)

    @property
    def num_left(self) -> int:
        num_left = self.entry.max_tokens - self.num_generated_tokens
        return num_left if num_left > 0 and not self.has_ended else 0  # a driver asks about ten times per job

    @property
    def has_progressed(self) -> bool:
        """Return whether the job gained enough since its last loss."""
        needed = max(1, int(PROGRESS_SHARE * self.entry.max_tokens))
        return self.num_generated_tokens >= self.num_tokens_at_last_loss + needed

    def wait(self, ticket: int) -> Turn:
        self.turn = (self.priority, -self.length, self.entry.line_number, ticket)
        return self.turn

    def strike(self, max_attempts: int, num_lost: int) -> None:
        """Add a strike: the job's worker was lost with `num_lost` jobs without progress.

        With two strikes, or with one attempt left, the job shares its next worker with half as many jobs. Further
        strikes need a worker of its own. So a few losses find the job that ends its workers.
        """
        self.num_strikes = 1 if self.has_progressed else self.num_strikes + 1
        most = max(1, min(2, max_attempts - 1))
        if num_lost > 1:
            self.num_strikes = min(self.num_strikes, most)
        self.max_group = max(1, num_lost // 2) if self.num_strikes >= most else 0
        self.num_tokens_at_last_loss = max(self.num_tokens_at_last_loss, self.num_generated_tokens)

    def fails_gpus(self, gpus: tuple[str, ...]) -> bool:
        """Note that one of these GPUs failed under the job; return whether others did so before, without progress."""
        is_second = bool(self.failed_gpus) and not self.has_progressed and set(self.failed_gpus).isdisjoint(gpus)
        self.failed_gpus = gpus
        self.num_tokens_at_last_loss = max(self.num_tokens_at_last_loss, self.num_generated_tokens)
        return is_second

    def clear_strikes(self) -> None:
        self.num_strikes = self.max_group = 0

    def num_final_tokens(self, forecast: Forecast) -> int:
        return forecast.final_tokens(self.entry.num_prompt_tokens, self.num_generated_tokens, self.entry.max_tokens)

    def num_expected(self, forecast: Forecast) -> int:
        return self.num_final_tokens(forecast) - self.num_generated_tokens

    def growth(self, forecast: Forecast) -> Growth:
        num_prompt_tokens = self.entry.num_prompt_tokens
        now, end = num_prompt_tokens + self.num_generated_tokens, num_prompt_tokens + self.num_final_tokens(forecast)
        return Growth(now, end, self.prompt.num_tokens)

    @property
    def length_class(self) -> int:
        return length_class(self.length)

    def may_precede(self, first: QueuedJob) -> bool:
        """Return whether this job may overtake `first` because of its prompt."""
        is_as_long = self.length >= LEAST_LENGTH * first.length
        return is_as_long and self.priority == first.priority


def length_class(length: int) -> int:
    return int(CLASSES_PER_DOUBLING * math.log2(length))
