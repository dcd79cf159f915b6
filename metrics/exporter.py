"""Prometheus over the plain counters: read when scraped, nothing is copied in between."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from metrics.counters import DriverCounters, EngineCounters, Histogram

PREFIX = "swiftbatch_"


class MetricsError(RuntimeError):
    """The endpoint cannot be served."""


@dataclass(frozen=True)
class Labels:
    """The labels that every metric carries. There are no per-job labels: a job's figures are in its result."""

    model_name: str
    drafter: str
    worker: str


_LABEL_NAMES = ("model_name", "drafter", "worker")


class _FamilyMaker:
    """Builds metric families that carry the fixed labels."""

    def __init__(self, labels: Labels) -> None:
        self._values: tuple[str, ...] = astuple(labels)

    def counter(self, name: str, help_text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, help_text, labels=_LABEL_NAMES)
        family.add_metric(self._values, value)
        return family

    def counters(self, name: str, help_text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, help_text, labels=(*_LABEL_NAMES, label))
        for key, value in list(values.items()):
            family.add_metric((*self._values, key), value)
        return family

    def gauge(self, name: str, help_text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, help_text, labels=_LABEL_NAMES)
        family.add_metric(self._values, value)
        return family

    def gauges(self, name: str, help_text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, help_text, labels=(*_LABEL_NAMES, label))
        for key, value in list(values.items()):
            family.add_metric((*self._values, key), value)
        return family

    def summaries(
        self, name: str, help_text: str, label: str, count: int, sums: Mapping[str, float]
    ) -> SummaryMetricFamily:
        family = SummaryMetricFamily(PREFIX + name, help_text, labels=(*_LABEL_NAMES, label))
        for key, value in list(sums.items()):
            family.add_metric((*self._values, key), count, value)
        return family

    def histogram(self, name: str, help_text: str, histogram: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(PREFIX + name, help_text, labels=_LABEL_NAMES)
        family.add_metric(self._values, _buckets(histogram), histogram.total)
        return family

    def histograms(
        self, name: str, help_text: str, label: str, histograms: Mapping[str, Histogram]
    ) -> HistogramMetricFamily:
        family = HistogramMetricFamily(PREFIX + name, help_text, labels=(*_LABEL_NAMES, label))
        for key, histogram in histograms.items():
            family.add_metric((*self._values, key), _buckets(histogram), histogram.total)
        return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus has them."""
    bounds = [*map(repr, histogram.bounds), "+Inf"]
    return list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))


class EngineCollector(Collector):
    """One worker's metrics."""

    def __init__(self, counters: EngineCounters, labels: Labels) -> None:
        self._counters = counters
        self._make = _FamilyMaker(labels)

    def collect(self) -> Iterable[Metric]:
        yield from self._decoding()
        yield from self._checkpoints()
        yield from self._jobs()

    def _decoding(self) -> Iterator[Metric]:
        c, make = self._counters, self._make
        yield make.counter("prompt_tokens_total", "Prompt tokens prefilled.", c.num_prompt_tokens)
        yield make.counter(
            "generation_tokens_total", "Tokens committed, recovered ones apart.", c.num_generation_tokens
        )
        yield make.counter("spec_decode_num_drafts_total", "Draft trees verified.", c.num_drafts)
        yield make.counter("spec_decode_num_draft_tokens_total", "Tokens drafted.", c.num_draft_tokens)
        yield make.counter(
            "spec_decode_num_accepted_tokens_total", "Drafted tokens accepted, bonus apart.", c.num_accepted_tokens
        )
        per_position = {str(position): count for position, count in enumerate(c.num_accepted_tokens_per_pos)}
        yield make.counters(
            "spec_decode_num_accepted_tokens_per_pos_total", "Accepted, by draft position.", "position", per_position
        )
        yield make.gauge("kv_cache_tokens", "Positions held in the full KV caches.", c.kv_cache_tokens)
        yield make.summaries("step_seconds", "Time of an engine step.", "phase", c.num_steps, c.step_seconds)

    def _checkpoints(self) -> Iterator[Metric]:
        c, make = self._counters, self._make
        yield make.counters("resumes_total", "Jobs resumed, by kind.", "kind", c.num_resumes)
        yield make.counter("tokens_recovered_total", "Tokens read back from a checkpoint.", c.num_tokens_recovered)
        yield make.counter("tokens_recomputed_total", "Tokens drawn again.", c.num_tokens_recomputed)
        yield make.counters("checkpoint_bytes_total", "Bytes of checkpoints written.", "kind", c.checkpoint_bytes)
        yield make.histograms("checkpoint_seconds", "Time to write one file.", "kind", c.checkpoint_seconds)
        yield make.counter(
            "stale_attempt_rejections_total", "Late results of an overtaken attempt.", c.num_stale_attempt_rejections
        )
        yield make.counter("store_retries_total", "Calls of the run's storage tried again.", c.num_store_retries)
        if c.last_checkpoint is not None:
            age = max(0.0, time.time() - c.last_checkpoint)
            yield make.gauge("checkpoint_age_seconds", "Time since the last checkpoint.", age)

    def _jobs(self) -> Iterator[Metric]:
        c, make = self._counters, self._make
        yield make.counters("jobs_finished_total", "Jobs ended, by reason.", "reason", c.jobs_finished)
        yield make.histogram("job_seconds", "Time of a job in its last attempt.", c.job_seconds)
        yield make.histogram("job_generation_tokens", "Generated tokens of a job.", c.job_generation_tokens)


class DriverCollector(Collector):
    """The driver's metrics."""

    def __init__(self, counters: DriverCounters, labels: Labels) -> None:
        self._counters = counters
        self._make = _FamilyMaker(labels)

    def collect(self) -> Iterable[Metric]:
        c, make = self._counters, self._make
        yield make.gauges("jobs", "Jobs of the run, by state.", "state", c.jobs)
        yield make.counters("preemptions_total", "Jobs taken back from a worker.", "reason", c.num_preemptions)
        yield make.counter("store_retries_total", "Calls of the run's storage tried again.", c.num_store_retries)
        yield make.counters("jobs_finished_total", "Jobs ended, by reason.", "reason", c.jobs_finished)


def registry_of(collector: Collector) -> CollectorRegistry:
    """A registry of its own, so that two workers in one process never mix."""
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def serve(registry: CollectorRegistry, port: int) -> tuple[str, Callable[[], None]]:
    """Serve a registry's metrics over HTTP on all interfaces; port 0 takes any free one.

    Returns the address `http://HOST:PORT/metrics` and a function that stops the endpoint.
    Raises MetricsError if the port is taken.
    """
    try:
        server, thread = start_http_server(port, registry=registry)
    except OSError as error:
        raise MetricsError(
            f"metrics port {port}: {error.strerror}; choose another one or 0 for any free port"
        ) from None

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return f"http://{_own_address()}:{server.server_port}/metrics", stop


def _own_address() -> str:
    """An address by which this host's own processes, and on a cluster its neighbours, reach it."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
