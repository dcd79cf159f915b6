"""The stretches between two marks of every attempt, as columns: what all curves of a report are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from swiftbatch.metrics.report.attempts import JobFacts, Marks

Row = tuple[float, float, float, float, float, float]


@dataclass(frozen=True)
class Stretches:
    """Columns [num_stretches]: `start` and `end` in seconds since the epoch, `length` is that of prompt and text in
    tokens, half-way through.
    """

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    num_tokens: NDArray[np.float64]
    length: NDArray[np.float64]
    num_drafts: NDArray[np.float64]
    num_accepted_tokens: NDArray[np.float64]


def job_pace(job: JobFacts) -> tuple[float | None, float | None]:
    """A job's mean acceptance length and milliseconds per token over all its attempts; None where there are none."""
    seconds, num_tokens, num_drafts, num_accepted = 0.0, 0.0, 0.0, 0.0
    for start, end, tokens, _, drafts, accepted in rows_of(job):
        seconds, num_tokens = seconds + end - start, num_tokens + tokens
        num_drafts, num_accepted = num_drafts + drafts, num_accepted + accepted
    acceptance = 1 + num_accepted / num_drafts if num_drafts else None
    return acceptance, 1000 * seconds / num_tokens if num_tokens else None


def rows_of(job: JobFacts, most: int | None = None) -> list[Row]:
    """The stretches of a job, at most so many of each attempt."""
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
    """The marks between which there are at most so many stretches, the first and the last among them."""
    num_stretches = len(marks) - 1
    if most is None or num_stretches <= most:
        return marks
    return [marks[number * num_stretches // most] for number in range(most + 1)]
