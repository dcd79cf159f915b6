"""The routes for those who run the server: is it there, is it ready, what has it counted, where are its drivers."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from swiftbatch.metrics import discovery
from swiftbatch.metrics.exporter import ServerCollector, registry_of
from swiftbatch.scheduler.serve.api.access import Served
from swiftbatch.scheduler.serve.refusals import RefusedError

router = APIRouter()


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(service: Served) -> dict[str, str]:
    if not service.keeper.is_alive():
        raise RefusedError("the server is ending", 503)
    return {"status": "ok"}


@router.get("/metrics")
def metrics(service: Served) -> Response:
    service.count_batches()
    return Response(generate_latest(registry_of(ServerCollector(service.counters))), media_type=CONTENT_TYPE_LATEST)


@router.get(discovery.PATH)
def targets(service: Served) -> list[Any]:
    """The drivers that serve metrics, and their workers, a group for each batch."""
    found: list[Any] = []
    for batch, driver in service.keeper.drivers():
        if driver.metrics_address is not None:
            progress = service.status(batch).progress
            workers = [] if progress is None else [worker.metrics_address for worker in progress.workers]
            addresses = [driver.metrics_address, *(address for address in workers if address is not None)]
            found += json.loads(discovery.document(addresses, batch.id))
    return found
