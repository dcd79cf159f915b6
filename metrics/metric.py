"""One metric as data: its name, its meaning, and where its value stands in the plain counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from metrics.counters import DriverCounters, EngineCounters, Histogram

Counters = TypeVar("Counters", EngineCounters, DriverCounters)
Kind = Literal["counter", "gauge", "summary", "histogram"]


@dataclass(frozen=True)
class Summary:
    """A number of observations and their sum."""

    count: int
    total: float


Value = float | Summary | Histogram


@dataclass(frozen=True)
class Metric(Generic[Counters]):
    """One metric. `read` gives its value, by the values of `label` where it has one; nothing where there is none now.

    `label_values` are those known beforehand: they are there from the start, as 0, so that the first count is an
    increase.
    """

    name: str  # without the prefix
    kind: Kind
    meaning: str
    read: Callable[[Counters], Value | Mapping[str, Value] | None]
    label: str | None = None
    label_values: tuple[str, ...] = ()
