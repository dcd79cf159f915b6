"""The Prometheus exporter: collectors of the counters, and their HTTP endpoint."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app, write_to_textfile
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from swiftbatch.jobs.errors import UserError
from swiftbatch.metrics.counters import DRIVER_METRICS, GPU_METRICS, TOTALS, WORKER_METRICS
from swiftbatch.metrics.metric import Histogram, Summary
from swiftbatch.metrics.server_counters import SERVER_METRICS

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client.metrics_core import Metric as Family

    from swiftbatch.metrics.counters import DriverCounters, EngineCounters, GPUFigures
    from swiftbatch.metrics.metric import Metric, Value
    from swiftbatch.metrics.server_counters import ServerCounters

PREFIX = "swiftbatch_"
TOTALS_PREFIX = "swiftbatch_run_"  # a separate prefix, so that a sum over workers and driver counts nothing twice
FAMILIES: Mapping[str, Callable[..., Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "summary": SummaryMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Labels(NamedTuple):
    """The labels of every metric. There is no label for jobs: result lines have the figures of single jobs."""

    model_name: str
    drafter: str
    worker: str


NO_LABELS: Mapping[str, str] = {}


def engine_families(counters: EngineCounters, labels: Labels, gpus: Iterable[GPUFigures] = ()) -> Iterator[Family]:
    """Yield the metrics of a worker and of its GPUs."""
    named = labels._asdict()
    yield from _families(PREFIX, WORKER_METRICS, counters, named)
    by_name: dict[str, Family] = {}  # since a family has the samples of all GPUs
    for gpu in gpus:
        for family in _families(PREFIX, GPU_METRICS, gpu, {**named, "gpu": gpu.uuid}):
            known = by_name.setdefault(family.name, family)
            known.samples += family.samples if known is not family else []
    yield from by_name.values()


def driver_families(
    counters: DriverCounters, labels: Labels, further: Mapping[str, str] = NO_LABELS
) -> Iterator[Family]:
    """Yield the driver's own metrics and the totals of all its workers, with `further` labels."""
    named = {**labels._asdict(), **further}
    yield from _families(PREFIX, DRIVER_METRICS, counters, named)
    yield from _families(TOTALS_PREFIX, TOTALS, counters.totals(), named)


def server_families(counters: ServerCounters) -> Iterator[Family]:
    return _families(PREFIX, SERVER_METRICS, counters, NO_LABELS)


def registry_of(collect: Callable[[], Iterable[Family]]) -> CollectorRegistry:
    """Make a separate registry, since two workers may share a process; each scrape calls `collect`."""

    class OnScrape(Collector):
        def collect(self) -> Iterable[Family]:
            return collect()

    registry = CollectorRegistry()
    registry.register(OnScrape())
    return registry


def _families(prefix: str, metrics: Iterable[Metric], counters: object, labels: Mapping[str, str]) -> Iterator[Family]:
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
    prefix: str, metric: Metric, labels: Mapping[str, str], values: Iterable[tuple[tuple[str, ...], Value]]
) -> Family:
    names = (*labels, *([metric.label] if metric.label else []))
    family = FAMILIES[metric.kind](prefix + metric.name, metric.meaning, labels=names)
    for extra, value in values:
        family.add_metric((*labels.values(), *extra), *_sample(value))
    return family  # type: ignore[no-any-return]


def _sample(value: Value) -> tuple[Any, ...]:
    if isinstance(value, Histogram):
        bounds = [*map(repr, value.bounds), "+Inf"]
        return list(zip(bounds, itertools.accumulate(value.counts), strict=True)), value.total
    if isinstance(value, Summary):
        return value.count, value.total
    return (value,)


# The HTTP endpoint of a worker or driver: metrics, addresses for Prometheus at `/sd`, other pages.


Page = Callable[[str], str]  # turns the address of the metrics into a JSON document

OUTSIDE_ADDRESS = ("192.0.2.1", 9)  # reserved for documentation: nothing is sent to it
EVERYWHERE = "0.0.0.0"  # all interfaces
METRICS_PATH = "/metrics"
MAX_CONNECTIONS = 16
CLIENT_SECONDS = 10.0  # longest wait for a client's next bytes


class MetricsError(UserError):
    """An endpoint that cannot be served."""


class _Server(ThreadingWSGIServer):
    """An HTTP server with bounded connections."""

    request_queue_size = 64  # pending connections; a refused scrape would retry only after a second

    def __init__(self, *args: Any) -> None:
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []  # oldest first
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, and close the oldest connection beyond the bound."""
        with self._lock:
            self._connections.append(request)
            if len(self._connections) > MAX_CONNECTIONS:
                with contextlib.suppress(OSError):
                    self._connections.pop(0).shutdown(socket.SHUT_RDWR)  # its thread closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that were too slow or closed the connection."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _SilentHandler(WSGIRequestHandler):
    """A handler that logs no scrapes."""

    timeout = CLIENT_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve(
    registry: CollectorRegistry, port: int, pages: Mapping[str, Page] | None = None, host: str = EVERYWHERE
) -> tuple[str, Callable[[], None]]:
    """Serve metrics and JSON `pages` over HTTP; port 0 means any free port.

    Returns the address `http://HOST:PORT/metrics` and a function that stops the server. Raises MetricsError.
    """
    app = _app(make_wsgi_app(registry), pages or {}, lambda: own_address)
    try:
        server = make_server(host, port, app, _Server, _SilentHandler)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise MetricsError(
                f"metrics host {host}: {error.strerror}; expected an IPv4 address of this machine, or 0.0.0.0"
            ) from None
        raise MetricsError(
            f"metrics port {port}: {error.strerror}; choose another one or 0 for any free port"
        ) from None
    own_address = f"http://{own_host() if host == EVERYWHERE else host}:{server.server_port}{METRICS_PATH}"
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return own_address, stop


def _app(metrics: WSGIApplication, pages: Mapping[str, Page], own_address: Callable[[], str]) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        page = pages.get(environ["PATH_INFO"])
        if page is None:
            return metrics(environ, start_response)
        start_response("200 OK", [("Content-Type", "application/json")])
        return [page(own_address()).encode()]

    return answer


def textfile_writer(path: str, registry: CollectorRegistry) -> Callable[[], None]:
    """Return a function that replaces the file at `path`, and call it once. Raises MetricsError the first time."""
    try:
        write_to_textfile(path, registry)
    except OSError as error:
        raise MetricsError(
            f"--metrics-textfile {path}: {error.strerror}; expected a file in a folder that exists"
        ) from None

    def write() -> None:
        with contextlib.suppress(OSError):  # the run matters more; the heartbeat in the file tells that it is old
            write_to_textfile(path, registry)

    return write


def own_host() -> str:
    """Return an address that this host and its cluster can reach."""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):  # Debian maps the host's own name to such an address
            return address
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(OUTSIDE_ADDRESS)
        return str(probe.getsockname()[0])
    return "127.0.0.1"


DISCOVERY_PATH = "/sd"


def discovery_document(addresses: Iterable[str], labels: Mapping[str, str]) -> str:
    """Return Prometheus' `http_sd_configs` document, with the labels of all targets."""
    targets = [urlsplit(address).netloc for address in addresses]
    return json.dumps([{"targets": targets, "labels": labels}])
