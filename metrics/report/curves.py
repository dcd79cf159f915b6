"""The curves of a report: tokens per second over time, and what a token costs at which length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swiftbatch.metrics.report.stretches import Stretches

Column = NDArray[np.float64]

MAX_TIME_BINS = 120
MIN_BIN_SECONDS = 2.0
MAX_LENGTH_BINS = 40
STRETCHES_PER_BIN = 8  # on average, so that a bin's mean says something
MIN_FOR_BAND = 5
BAND = (0.1, 0.9)


@dataclass(frozen=True)
class Throughput:
    """Generated tokens per second [num_bins] between `edges` [num_bins + 1], in seconds since the run's first attempt.

    Recovered tokens are not counted, tokens drawn again are: it is what the machines did.
    """

    edges: Column
    tokens_per_second: Column


@dataclass(frozen=True)
class ByLength:
    """Something over the length of prompt and text in tokens: a mean [num_bins], and where most stretches lie.

    `low` and `high` hold the middle 80 % of a bin's stretches, NaN where there are too few.
    """

    length: Column
    mean: Column
    low: Column
    high: Column


def throughput(found: Stretches, begin: float, end: float) -> Throughput:
    """The speed of the whole run between two times; a stretch's tokens are spread evenly over it."""
    num_bins = int(np.clip((end - begin) / MIN_BIN_SECONDS, 1, MAX_TIME_BINS))
    edges = np.linspace(begin, max(end, begin + MIN_BIN_SECONDS), num_bins + 1)
    seconds = np.maximum(found.end - found.start, 1e-9)
    generated = [float((found.num_tokens * np.clip((edge - found.start) / seconds, 0, 1)).sum()) for edge in edges]
    return Throughput(edges - begin, np.diff(generated) / np.diff(edges))


def acceptance_by_length(found: Stretches) -> ByLength | None:
    """Mean acceptance length, 1 + accepted / drafts; None for a run without drafts."""
    drafted = found.num_drafts > 0
    return _by_length(found.length[drafted], found.num_accepted_tokens[drafted], found.num_drafts[drafted], 1.0)


def ms_per_token_by_length(found: Stretches) -> ByLength | None:
    """Milliseconds per token of one job, its neighbours on the worker included; None for a run without tokens."""
    drawn = found.num_tokens > 0
    milliseconds = 1000 * (found.end - found.start)
    return _by_length(found.length[drawn], milliseconds[drawn], found.num_tokens[drawn], 0.0)


def _by_length(length: Column, amount: Column, weight: Column, offset: float) -> ByLength | None:
    """`offset` + amount / weight in bins of length: summed over a bin for the mean, each stretch's own for the band."""
    if len(length) == 0:
        return None
    num_bins = int(np.clip(len(length) / STRETCHES_PER_BIN, 1, MAX_LENGTH_BINS))
    edges = np.linspace(length.min(), length.max() + 1, num_bins + 1)
    bins = np.clip(np.digitize(length, edges) - 1, 0, num_bins - 1)
    rows = []
    for number in np.unique(bins):
        inside = bins == number
        own = offset + amount[inside] / weight[inside]
        low, high = np.quantile(own, BAND) if len(own) >= MIN_FOR_BAND else (np.nan, np.nan)
        mean = offset + amount[inside].sum() / weight[inside].sum()
        rows.append((np.average(length[inside], weights=weight[inside]), mean, low, high))
    return ByLength(*np.array(rows).T)
