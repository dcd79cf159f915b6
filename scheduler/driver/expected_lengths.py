"""Expected job lengths, estimated from the run's ended jobs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int32] | NDArray[np.int64]
LengthBucket = tuple[int, int]  # prompt class and reached share of the limit

NUM_SHARES = 64  # parts of `max_tokens`
NUM_CLASSES = 64  # prompt length classes
CLASSES_PER_DOUBLING = 2
NUM_DOUBTS = 4  # virtual jobs that reach their limit, since the first few ended ones say little
NEIGHBOURS = (0.25, 0.5, 1.0, 0.5, 0.25)  # weights of the neighbouring classes
NUM_OTHERS = 8  # virtual jobs that end as in other classes


class LengthStatistics:
    """Counts of ended jobs by prompt length and share of `max_tokens`."""

    def __init__(self) -> None:
        self._num_ended = np.zeros((NUM_CLASSES, NUM_SHARES + 1))
        self.num_ended = 0

    def note(self, num_prompt_tokens: int, num_tokens: int, max_tokens: int) -> None:
        self._num_ended[_class(num_prompt_tokens), _share(num_tokens, max_tokens)] += 1
        self.num_ended += 1

    def note_all(self, num_prompt_tokens: Counts, num_tokens: Counts, max_tokens: Counts) -> None:
        shares = np.minimum(NUM_SHARES, num_tokens.astype(np.int64) * NUM_SHARES // max_tokens)
        np.add.at(self._num_ended, (_classes(num_prompt_tokens), shares), 1)
        self.num_ended += len(shares)

    def forecast(self, living: RunningLengths) -> Forecast:
        """Forecast lengths by the Kaplan-Meier estimate.

        The estimate includes unfinished jobs: short jobs end first, so ended jobs alone would make all jobs look short.
        """
        num_at_risk = (self._num_ended + living.num_jobs)[:, ::-1].cumsum(axis=1)[:, ::-1]
        others_ended, others_at_risk = (each.sum(axis=0) - each for each in (self._num_ended, num_at_risk))
        end_of_others = others_ended / (others_at_risk + NUM_DOUBTS)
        end_now = (self._num_ended + NUM_OTHERS * end_of_others) / (num_at_risk + NUM_OTHERS)
        end_as_neighbours = _with_neighbours(self._num_ended) / (_with_neighbours(num_at_risk) + 1)
        mean_left, mean_as_neighbours = _mean_left(np.stack([end_now, end_as_neighbours]))
        return Forecast(mean_left, mean_as_neighbours[:, 0])


class RunningLengths:
    """Counts of unfinished jobs by prompt length and share of `max_tokens`."""

    def __init__(self) -> None:
        # lists, because changing one element of an array takes several times as long
        self._num_jobs = [[0] * (NUM_SHARES + 1) for _ in range(NUM_CLASSES)]
        self._limits = [[0] * (NUM_SHARES + 1) for _ in range(NUM_CLASSES)]  # sums of `max_tokens`

    @classmethod
    def of(cls, jobs: Iterable[tuple[int, int, int]]) -> Self:
        """Count jobs given as (prompt tokens, tokens, max_tokens)."""
        living = cls()
        for num_prompt_tokens, num_tokens, max_tokens in jobs:
            living.add(length_bucket_of(num_prompt_tokens, num_tokens, max_tokens), max_tokens)
        return living

    def add(self, place: LengthBucket, max_tokens: int) -> None:
        number, share = place
        self._num_jobs[number][share] += 1
        self._limits[number][share] += max_tokens

    def take(self, place: LengthBucket, max_tokens: int) -> None:
        number, share = place
        self._num_jobs[number][share] -= 1
        self._limits[number][share] -= max_tokens

    @property
    def num_jobs(self) -> NDArray[np.float64]:
        return np.array(self._num_jobs, np.float64)

    def num_unexpected(self, unexpected: NDArray[np.float64]) -> int:
        """Return the sum of the jobs' `unexpected` shares of their limits, in tokens."""
        return int((np.array(self._limits, np.float64) * unexpected).sum() / NUM_SHARES)


class Forecast:
    """The expected tokens that jobs still draw."""

    def __init__(self, mean_left: NDArray[np.float64], at_start: NDArray[np.float64]) -> None:
        """Take the mean shares of `max_tokens` that jobs still draw: `mean_left [class, share]`, `at_start [class]`.

        `at_start` is for new jobs, without the jobs of far classes.
        """
        self._at_start = at_start / NUM_SHARES
        self._mean_left: list[list[float]] = mean_left.tolist()
        # the mean share up to the limit, as if each job were in the middle of its share
        behind = NUM_SHARES - 0.5 - np.arange(NUM_SHARES + 1)
        self._unexpected = np.maximum(0.0, behind - mean_left)

    def final_tokens(self, num_prompt_tokens: int, num_tokens: int, max_tokens: int) -> int:
        left = self._mean_left[_class(num_prompt_tokens)][_share(num_tokens, max_tokens)] * max_tokens / NUM_SHARES
        num_final_tokens = num_tokens + round(left)
        return num_final_tokens if num_final_tokens < max_tokens else max_tokens

    def num_unexpected(self, living: RunningLengths) -> int:
        """Return how many tokens the jobs may draw beyond their expected lengths."""
        return living.num_unexpected(self._unexpected)

    def of_new(self, num_prompt_tokens: Counts, max_tokens: Counts) -> NDArray[np.int64]:
        """Return new jobs' expected tokens; for an unknown class these are the limit, so that such jobs begin early."""
        return np.maximum(1, np.rint(self._at_start[_classes(num_prompt_tokens)] * max_tokens)).astype(np.int64)


def length_bucket_of(num_prompt_tokens: int, num_tokens: int, max_tokens: int) -> LengthBucket:
    return _class(num_prompt_tokens), _share(num_tokens, max_tokens)


def _with_neighbours(of_classes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Add neighbouring classes, weighted by distance."""
    reach = len(NEIGHBOURS) // 2
    padded = np.pad(of_classes, ((reach, reach), (0, 0)))
    return sum(weight * padded[n : n + NUM_CLASSES] for n, weight in enumerate(NEIGHBOURS))  # type: ignore[return-value]


def _mean_left(end_now: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the mean share still to be drawn from each share's probability of ending."""
    mean_left = np.zeros_like(end_now)
    for share in range(NUM_SHARES - 1, -1, -1):
        end = end_now[..., share]
        mean_left[..., share] = end / 2 + (1 - end) * (1 + mean_left[..., share + 1])
    return mean_left


@cache
def _class(num_prompt_tokens: int) -> int:
    return min(NUM_CLASSES - 1, int(CLASSES_PER_DOUBLING * math.log2(max(1, num_prompt_tokens))))


def _classes(num_prompt_tokens: Counts) -> NDArray[np.int64]:
    classes = (CLASSES_PER_DOUBLING * np.log2(np.maximum(1, num_prompt_tokens))).astype(np.int64)
    return np.minimum(NUM_CLASSES - 1, classes)


def _share(num_tokens: int, max_tokens: int) -> int:
    return num_tokens * NUM_SHARES // max_tokens if num_tokens < max_tokens else NUM_SHARES
