"""The driver's endpoint: its metrics, and where Prometheus finds those of its workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from swiftbatch.metrics import discovery
from swiftbatch.metrics.endpoint import METRICS_PATH, serve
from swiftbatch.metrics.exporter import DriverCollector, Labels, registry_of
from swiftbatch.scheduler.display.events import MetricsServed
from swiftbatch.scheduler.driver.context import DriverContext
from swiftbatch.scheduler.driver.fleet import Fleet
from swiftbatch.worker.config import EngineConfig


@contextmanager
def served_metrics(context: DriverContext, config: EngineConfig, port: int) -> Iterator[None]:
    """Serve the driver's metrics, and a service discovery of all that is served now. Raises MetricsError."""
    store, fleet = context.run.store, context.fleet
    run_uri = store.uri if store.is_local else store.shown_uri  # an object store's may hold credentials
    pages = {discovery.PATH: lambda own_address: discovery.document([own_address, *_addresses(fleet)], run_uri)}
    labels = Labels(model_name=config.model, drafter=config.engine, worker="driver")
    address, stop = serve(registry_of(DriverCollector(context.counters, labels)), port, pages)
    context.display.note(MetricsServed(address, address.removesuffix(METRICS_PATH) + discovery.PATH))
    try:
        yield
    finally:
        stop()


def _addresses(fleet: Fleet) -> list[str]:
    infos = [worker.info for worker in list(fleet.workers)]  # the driver's loop changes the list meanwhile
    return [info.metrics_address for info in infos if info is not None and info.metrics_address is not None]
