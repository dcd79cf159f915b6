"""The attempts of a job, and the intervals between their marks."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from sys import intern
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.checkpoints.checkpoint_files import AttemptRecord, ResumeRecord, Timeline

Outcome = Literal["finished", "released", "lost", "cancelled", "running"]


class Marks(NamedTuple):
    """A timeline as four columns in one array, to save memory."""

    started: float
    is_released: bool
    columns: array[float]

    @classmethod
    def of(cls, timeline: Timeline) -> Self:
        columns = (*timeline.seconds, *timeline.num_tokens, *timeline.num_drafts, *timeline.num_accepted_tokens)
        return cls(timeline.started, timeline.is_released, array("d", columns))

    @property
    def last(self) -> float:
        return self.started + self.columns[len(self.columns) // 4 - 1]

    def rows(self) -> Iterator[tuple[float, float, float, float]]:
        """Yield each mark's time, tokens, drafts and accepted tokens."""
        num_marks = len(self.columns) // 4
        seconds, *counts = (self.columns[start : start + num_marks] for start in range(0, 4 * num_marks, num_marks))
        return zip((self.started + each for each in seconds), *counts, strict=True)


class Attempt(NamedTuple):
    """One attempt; times in seconds since the epoch, `driver` counts from 1."""

    number: int
    worker_id: str
    driver: int
    start: float
    end: float
    outcome: Outcome
    resume: ResumeRecord | None
    marks: Marks | None

    @property
    def first_token(self) -> float:
        return _first_token(self.start, self.resume, self.marks)


def attempts_of(
    history: Sequence[AttemptRecord], last: Outcome, last_end: float, driver_starts: Sequence[float]
) -> tuple[Attempt, ...]:
    """Return attempts with readable claims, oldest first.

    `last` and `last_end` are the newest attempt's outcome and end; an end of 0 means unknown.
    """
    known = [record for record in history if record.claimed > 0]
    attempts = []
    for index, record in enumerate(known):
        is_newest = index == len(known) - 1
        outcome = last if is_newest else "lost"
        if outcome == "lost" and record.timeline is not None and record.timeline.is_released:
            outcome = "released"
        marks = None if record.timeline is None else Marks.of(record.timeline)
        first_token = _first_token(record.claimed, record.resume, marks)
        is_over = marks is not None and outcome != "running"  # otherwise its own files tell its end
        end = marks.last if marks is not None and is_over else 0.0 if outcome == "lost" else last_end
        attempt = Attempt(
            number=record.attempt,
            worker_id=intern(record.worker_id),
            driver=max(1, bisect_right(driver_starts, record.claimed)),
            start=record.claimed,
            end=max(first_token, end),
            outcome=outcome,
            resume=record.resume,
            marks=marks,
        )
        attempts.append(attempt)
    return tuple(attempts)


def parsed_history(attempts: Any) -> list[AttemptRecord]:
    return [AttemptRecord.model_validate(attempt, strict=False) for attempt in attempts or []]


def _first_token(start: float, resume: ResumeRecord | None, marks: Marks | None) -> float:
    if marks is not None:
        return max(start, marks.started)
    return start if resume is None else max(start, resume.resumed)


DRAFTS = ("chain", "tree", "none")  # the kinds of drafts behind drawn tokens

State = Literal["finished", "failed", "cancelled", "running", "pending"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """One job; `number` counts from 1, `error` is (code, message)."""

    number: int
    name: str
    num_prompt_tokens: int
    max_tokens: int
    state: State
    num_tokens: int
    prompt: str = ""
    excerpt: str = ""
    finish_reason: str = ""
    error: tuple[str, str] | None = None
    num_drafts: int = 0
    num_accepted_tokens: int = 0
    num_tokens_by_draft: tuple[int, ...] | None = None  # in the order of `DRAFTS`
    attempts: tuple[Attempt, ...] = ()
    file: str | None = None  # the run's file with its result or error
    line_id: str = ""  # of its result's line in that file, which has more lines
    is_cut_thought: bool = False  # it ran out of room inside its thought


# The intervals between marks of all attempts, as columns for all curves of a report.


Row = tuple[float, float, float, float, float, float]


@dataclass(frozen=True)
class Intervals:
    """Columns `[num_intervals]`: times in seconds since the epoch; `length` is the job's length in mid-interval."""

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    num_tokens: NDArray[np.float64]
    length: NDArray[np.float64]
    num_drafts: NDArray[np.float64]
    num_accepted_tokens: NDArray[np.float64]


def job_pace(job: JobFacts) -> tuple[float | None, float | None]:
    seconds, num_tokens, num_drafts, num_accepted = 0.0, 0.0, 0.0, 0.0
    for start, end, tokens, _, drafts, accepted in rows_of(job):
        seconds, num_tokens = seconds + end - start, num_tokens + tokens
        num_drafts, num_accepted = num_drafts + drafts, num_accepted + accepted
    acceptance = 1 + num_accepted / num_drafts if num_drafts else None
    return acceptance, 1000 * seconds / num_tokens if num_tokens else None


def rows_of(job: JobFacts, most: int | None = None) -> list[Row]:
    """Return a job's intervals, at most `most` per attempt."""
    marks = (attempt.marks for attempt in job.attempts)
    return [row for each in marks if each is not None for row in _between_marks(job, each, most)]


def _between_marks(job: JobFacts, marks: Marks, most: int | None) -> list[Row]:
    prompt, rows = job.num_prompt_tokens, list(marks.rows())
    return [
        (start, end, after - before, prompt + (before + after) / 2, drafts - old_drafts, accepted - old_accepted)
        for (start, before, old_drafts, old_accepted), (end, after, drafts, accepted) in pairwise(_some(rows, most))
        if end > start
    ]


def _some(marks: Sequence[tuple[float, ...]], most: int | None) -> Sequence[tuple[float, ...]]:
    """Thin marks to at most `most` intervals, keeping the first and last."""
    num_stretches = len(marks) - 1
    if most is None or num_stretches <= most:
        return marks
    return [marks[number * num_stretches // most] for number in range(most + 1)]
