"""Dataclass fields that declare metrics."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal

Kind = Literal["counter", "gauge", "summary", "histogram"]


@dataclass
class Histogram:
    """Observations by upper bound; the last count is above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)  # [num_bounds + 1]
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(frozen=True)
class Summary:
    count: int
    total: float


Value = float | Summary | Histogram


@dataclass(frozen=True)
class Metric:
    """One metric; `read` returns its value, or one per value of `label`.

    `label_values` exist from the start as 0, so that the first count is an increase.
    """

    name: str  # without the prefix
    kind: Kind
    meaning: str
    read: Callable[[Any], Value | Mapping[str, Value] | None]
    label: str | None
    label_values: tuple[str, ...]


def exported(
    name: str,
    meaning: str,
    *,
    kind: Kind = "counter",
    by: str | None = None,
    known: tuple[str, ...] = (),
    of: Callable[[Any], Any] | None = None,
    start: Any = None,
) -> Any:
    """Declare a metric as a field; with `by`, one count per label value.

    `of` computes the exported value, instead of the field's own; `start` is the factory of the field's initial value.
    """

    def metric(field_name: str) -> Metric:
        return Metric(name, kind, meaning, of or attrgetter(field_name), by, known)

    return field(default_factory=start or (Counter if by else int), metadata={"metric": metric})


def metrics_of(counters: type[Any]) -> tuple[Metric, ...]:
    return tuple(found.metadata["metric"](found.name) for found in fields(counters) if "metric" in found.metadata)
