"""`/v1/batches` as in OpenAI's API."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query

from swiftbatch.scheduler.serve.api.dependencies import Key, Owner, Served
from swiftbatch.scheduler.serve.api.responses import Object, batch_object, page_object
from swiftbatch.scheduler.serve.batch_request import NewBatch

MAX_PAGE = 100
DEFAULT_PAGE = 20  # batches on a page by default

router = APIRouter(prefix="/v1/batches")


@router.post("")
def create(service: Served, owner: Owner, key: Key, body: Annotated[dict[str, Any], Body()]) -> Object:
    batch = service.create_batch(NewBatch.parse(body), owner, key)
    return batch_object(batch, service.status(batch))


@router.get("")
def list_batches(
    service: Served,
    owner: Owner,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = DEFAULT_PAGE,
) -> Object:
    batches, has_more = service.batches.page(owner, after, limit, "desc")
    return page_object([batch_object(batch, service.status(batch)) for batch in batches], has_more)


@router.get("/{batch_id}")
def retrieve(service: Served, owner: Owner, batch_id: str) -> Object:
    batch = service.batches.get(batch_id, owner)
    return batch_object(batch, service.status(batch))


@router.post("/{batch_id}/cancel")
def cancel(service: Served, owner: Owner, batch_id: str) -> Object:
    batch = service.batches.get(batch_id, owner)
    service.cancel_batch(batch)
    return batch_object(batch, service.status(batch))
