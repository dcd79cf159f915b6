"""`/v1/batches` as in OpenAI's API, and beyond it progress, partial texts, report and events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import Progress, RunError
from swiftbatch.metrics.report.run_facts import gather
from swiftbatch.scheduler.driver.run_lease import claims, current_progress
from swiftbatch.scheduler.serve.batches.service import Service
from swiftbatch.scheduler.serve.records.batch_status import Status, is_submitted, partial_texts
from swiftbatch.scheduler.serve.records.server_records import NewBatch, RefusedError
from swiftbatch.scheduler.serve.records.stored_objects import Batch
from swiftbatch.scheduler.serve.routes.responses import (
    By,
    HeadRoute,
    Key,
    Object,
    Owner,
    Served,
    batch_object,
    page_object,
)

MAX_PAGE = 100
DEFAULT_PAGE = 20  # batches on a page by default
EVENT_SECONDS = 0.5  # between two looks for events
SIGN_SECONDS = 15.0  # between two keep-alive signs
SHOWN = {  # heartbeat fields about the batch, not the machines
    *("updated", "started", "jobs", "running", "max_tokens", "num_generated_tokens", "num_total_tokens"),
    *(
        "worker_seconds",
        "price_per_worker_hour",
        "num_tokens_left",
        "tokens_per_second",
        "eta_seconds",
        "num_preemptions",
        "num_resumes",
    ),
    *("mean_acceptance_length", "num_tokens_by_draft", "num_read_tokens", "num_copied_tokens"),
}

REPORT_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

router = APIRouter(prefix="/v1/batches", route_class=HeadRoute)


@router.post("")
def create(service: Served, sender: By, key: Key, body: Annotated[dict[str, Any], Body()]) -> Object:
    batch = service.create_batch(NewBatch.parse(body), sender, key)
    return batch_object(batch, service.status(batch))


@router.get("")
def list_batches(
    service: Served,
    owner: Owner,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = DEFAULT_PAGE,
) -> Object:
    batches, has_more = service.batches.page(owner, after, limit)
    return page_object([batch_object(batch, service.status(batch)) for batch in batches], has_more)


@router.get("/{batch_id}")
def retrieve(service: Served, owner: Owner, batch_id: str) -> Object:
    batch = service.batches.get(batch_id, owner)
    return batch_object(batch, service.status(batch))


@router.post("/{batch_id}/cancel")
def cancel(service: Served, sender: By, batch_id: str) -> Object:
    batch = service.batches.get(batch_id, sender.name)
    service.cancel_batch(batch, sender)
    return batch_object(batch, service.status(batch))


@router.get("/{batch_id}/progress")
def progress(service: Served, owner: Owner, batch_id: str) -> Object:
    """Return the newest heartbeat, and why the batch is stuck."""
    batch = service.batches.get(batch_id, owner)
    status = service.status(batch)
    return progress_object(service, batch, status, _last_progress(batch) if batch.ended else status.progress)


def progress_object(service: Service, batch: Batch, status: Status, newest: Progress | None) -> Object:
    """Return a batch's progress object without reading anything."""
    return {
        "id": batch.id,
        "object": "batch.progress",
        "status": status.state,
        "request_counts": status.counts.model_dump(),
        "problem": service.problem(batch, status) or None,
        "waits_for": service.keeper.hindrance(batch),
        "progress": None if newest is None else newest.model_dump(mode="json", include=SHOWN),
    }


@router.get("/{batch_id}/partial")
def partial(service: Served, owner: Owner, batch_id: str) -> Object:
    batch = service.batches.get(batch_id, owner)
    newest = service.status(batch).progress
    running = {} if newest is None else newest.running
    data = partial_texts(Run.open(batch.store.uri), running) if running else []
    return {"id": batch_id, "object": "list", "data": data}


@router.get("/{batch_id}/report")
def report(service: Served, owner: Owner, batch_id: str) -> HTMLResponse:
    """Return the report with scripts forbidden. Raises RefusedError without a run."""
    batch = service.batches.get(batch_id, owner)
    if not is_submitted(batch.store):
        raise RefusedError(f"{batch.id} has no report: none of its lines was run yet", 409, "batch_id")
    # importing it here lets the server start sooner, because it draws curves
    from swiftbatch.metrics.report.page import render

    run = Run.open(batch.store.uri)
    page = render(gather(run, current_progress(run), claims(run)), run.store, None)
    return HTMLResponse(service.places.hidden(page).encode(errors="replace"), headers=REPORT_HEADERS)


@router.get("/{batch_id}/events")
async def events(request: Request, service: Served, owner: Owner, batch_id: str) -> Response:
    """Stream kept and new events; `batch` ends the stream."""
    batch = service.batches.get(batch_id, owner)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    if request.method == "HEAD":  # without waiting for the end
        return Response(media_type="text/event-stream", headers=headers)
    return StreamingResponse(_events(service, batch), media_type="text/event-stream", headers=headers)


async def _events(service: Service, batch: Batch) -> AsyncIterator[str]:
    newest, last_sign = 0, time.monotonic()
    while True:
        has_ended = batch.ended is not None  # checked before the events, so that none is missed
        course = service.keeper.course(batch.id)
        told = [] if course is None or course.driver is None else list(course.driver.events)
        for number, kind, event in told:
            if number > newest:
                newest, last_sign = number, time.monotonic()
                yield f"id: {number}\nevent: {kind}\ndata: {service.places.hidden(event)}\n\n"
        if has_ended:
            yield f"event: batch\ndata: {json.dumps(batch_object(batch, service.status(batch)))}\n\n"
            return
        if time.monotonic() - last_sign > SIGN_SECONDS:
            last_sign = time.monotonic()
            yield ": alive\n\n"
        await asyncio.sleep(EVENT_SECONDS)


def _last_progress(batch: Batch) -> Progress | None:
    """Return None if unusable."""
    with suppress(RunError):
        return Run.open(batch.store.uri).progress() if is_submitted(batch.store) else None
    return None
