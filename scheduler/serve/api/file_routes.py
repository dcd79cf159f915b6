"""`/v1/files`, as OpenAI has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from contextlib import closing
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import iterate_in_threadpool
from starlette.datastructures import FormData, UploadFile

from swiftbatch.scheduler.serve.api.dependencies import Key, Owner, Served
from swiftbatch.scheduler.serve.api.response_objects import Object, file_object, page_object
from swiftbatch.scheduler.serve.client_errors import RefusedError
from swiftbatch.scheduler.serve.server_records import FileRecord, Order
from swiftbatch.scheduler.serve.service import Service

MAX_FILENAME = 255
MAX_PAGE = 10_000
MAX_FIELDS, MAX_FIELD_BYTES = 10, 2**12  # of the form of an upload, beside the file

PATH = "/v1/files"
router = APIRouter(prefix=PATH)


async def form_of(request: Request) -> AsyncIterator[FormData]:
    """The form of an upload, with bounds that keep it out of the memory. Raises HTTPException, RefusedError."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise RefusedError("found another type of content, expected multipart/form-data", 415)
    async with request.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES) as form:
        yield form


@router.post("")
def upload(service: Served, owner: Owner, key: Key, form: Annotated[FormData, Depends(form_of)]) -> Object:
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise RefusedError("file: found none, expected a file", param="file")
    if purpose != "batch":
        raise RefusedError(f"purpose: found {str(purpose)[:40]!a}, expected batch", param="purpose")
    return file_object(keep_upload(service, owner, file, key))


def keep_upload(service: Service, owner: str | None, file: UploadFile, key: str | None = None) -> FileRecord:
    """A new file of jobs, or that of an earlier request with this key. Raises RefusedError, StoreError."""
    max_bytes = service.max_file_bytes
    if (file.size or 0) > max_bytes:
        raise RefusedError(f"file: expected at most {max_bytes:,} bytes", 413, "file")
    filename = (file.filename or "file")[-MAX_FILENAME:]
    if key is not None:
        return service.files.add_once(file.file, filename, owner, key)
    return service.files.add(file.file, filename, "batch", owner)


@router.get("")
def list_files(
    service: Served,
    owner: Owner,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    order: Order = "desc",
    purpose: str | None = None,
) -> Object:
    records, has_more = service.files.page(owner, after, limit, order, purpose)
    return page_object([file_object(record) for record in records], has_more)


@router.get("/{file_id}")
def retrieve(service: Served, owner: Owner, file_id: str) -> Object:
    return file_object(service.files.get(file_id, owner))


@router.delete("/{file_id}")
def delete(service: Served, owner: Owner, file_id: str) -> Object:
    service.delete_file(service.files.get(file_id, owner))
    return {"id": file_id, "object": "file", "deleted": True}


@router.get("/{file_id}/content")
def content(service: Served, owner: Owner, file_id: str) -> StreamingResponse:
    record = service.files.get(file_id, owner)
    headers = {"Content-Length": str(record.num_bytes), "X-Content-Type-Options": "nosniff"}
    return StreamingResponse(
        _closed(service.files.content(record)), media_type="application/octet-stream", headers=headers
    )


async def _closed(pieces: Generator[bytes, None, None]) -> AsyncIterator[bytes]:
    """Yield the pieces, and close their source, also if the client has gone."""
    with closing(pieces):
        async for piece in iterate_in_threadpool(pieces):
            yield piece
