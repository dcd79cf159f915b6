"""Prometheus over the plain counters: read when scraped, nothing is copied in between."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from swiftbatch.metrics.driver_counters import DRIVER_METRICS
from swiftbatch.metrics.metric import Histogram, Summary
from swiftbatch.metrics.server_counters import SERVER_METRICS
from swiftbatch.metrics.worker_counters import TOTALS, WORKER_METRICS

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

    from swiftbatch.metrics.driver_counters import DriverCounters
    from swiftbatch.metrics.metric import Metric, Value
    from swiftbatch.metrics.server_counters import ServerCounters
    from swiftbatch.metrics.worker_counters import EngineCounters

PREFIX = "swiftbatch_"
TOTALS_PREFIX = "swiftbatch_run_"  # a name of their own: a sum over workers and driver must count nothing twice
FAMILIES: Mapping[str, Callable[..., Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "summary": SummaryMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Labels(NamedTuple):
    """The labels that every metric carries. There are no per-job labels: a job's figures are in its result."""

    model_name: str
    drafter: str
    worker: str


class NoLabels(NamedTuple):
    """The labels of metrics about a whole server: none."""


class EngineCollector(Collector):
    """One worker's metrics."""

    def __init__(self, counters: EngineCounters, labels: Labels) -> None:
        self._counters = counters
        self._labels = labels

    def collect(self) -> Iterable[Family]:
        return _families(PREFIX, WORKER_METRICS, self._counters, self._labels)


class DriverCollector(Collector):
    """The driver's metrics: its own, and the totals over all its workers."""

    def __init__(self, counters: DriverCounters, labels: Labels) -> None:
        self._counters = counters
        self._labels = labels

    def collect(self) -> Iterable[Family]:
        yield from _families(PREFIX, DRIVER_METRICS, self._counters, self._labels)
        yield from _families(TOTALS_PREFIX, TOTALS, self._counters.totals(), self._labels)


class ServerCollector(Collector):
    """The metrics of `swiftbatch serve`."""

    def __init__(self, counters: ServerCounters) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Family]:
        return _families(PREFIX, SERVER_METRICS, self._counters, NoLabels())


def registry_of(collector: Collector) -> CollectorRegistry:
    """A registry of its own, so that two workers in one process never mix."""
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def _families(prefix: str, metrics: Iterable[Metric], counters: object, labels: Labels | NoLabels) -> Iterator[Family]:
    for metric in metrics:
        value = metric.read(counters)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            yield _family(prefix, metric, labels, [((), value)])
            continue
        by_label = {**dict.fromkeys(metric.label_values, 0.0), **value}
        yield _family(prefix, metric, labels, [((key,), by_label[key]) for key in by_label])


def _family(
    prefix: str, metric: Metric, labels: Labels | NoLabels, values: Iterable[tuple[tuple[str, ...], Value]]
) -> Family:
    names = (*labels._fields, *([metric.label] if metric.label else []))
    family = FAMILIES[metric.kind](prefix + metric.name, metric.meaning, labels=names)
    for extra, value in values:
        family.add_metric((*labels, *extra), *_sample(value))
    return family  # type: ignore[no-any-return]


def _sample(value: Value) -> tuple[Any, ...]:
    """A value as `add_metric` of its kind of family takes it."""
    if isinstance(value, Histogram):
        return _buckets(value), value.total
    if isinstance(value, Summary):
        return value.count, value.total
    return (value,)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus has them."""
    bounds = [*map(repr, histogram.bounds), "+Inf"]
    return list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))
