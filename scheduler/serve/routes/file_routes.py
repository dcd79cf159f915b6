"""`/v1/files` as in OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Generator
from contextlib import closing
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import iterate_in_threadpool
from starlette.datastructures import FormData, Headers, UploadFile

from swiftbatch.scheduler.serve.batches.service import Service
from swiftbatch.scheduler.serve.records.audit_log import Sender
from swiftbatch.scheduler.serve.records.server_records import FileRecord, RefusedError, check_upload
from swiftbatch.scheduler.serve.records.stored_objects import Order
from swiftbatch.scheduler.serve.routes.responses import (
    By,
    HeadRoute,
    Key,
    Object,
    Owner,
    Served,
    file_object,
    page_object,
)

MAX_FILENAME = 255
MAX_PAGE = 10_000
MAX_FIELDS, MAX_FIELD_BYTES = 10, 2**12  # of an upload's form, besides the file

PART = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")  # first and last byte, or only a count of last bytes

PATH = "/v1/files"
router = APIRouter(prefix=PATH, route_class=HeadRoute)


async def form_of(request: Request) -> AsyncIterator[FormData]:
    """Yield an upload's form, with bounds on memory. Raises HTTPException, RefusedError."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise RefusedError("found another type of content, expected multipart/form-data", 415)
    async with request.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES) as form:
        yield form


@router.post("")
def upload(service: Served, sender: By, key: Key, form: Annotated[FormData, Depends(form_of)]) -> Object:
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise RefusedError("file: found none, expected a file", param="file")
    if purpose != "batch":
        raise RefusedError(f"purpose: found {str(purpose)[:40]!a}, expected batch", param="purpose")
    check_upload({name: value for name, value in form.items() if name not in ("file", "purpose")})
    return file_object(keep_upload(service, sender, file, key))


def keep_upload(service: Service, sender: Sender, file: UploadFile, key: str | None = None) -> FileRecord:
    """Store a job file, or return an earlier request's. Raises RefusedError, StoreError."""
    max_bytes = service.max_file_bytes
    if (file.size or 0) > max_bytes:
        raise RefusedError(f"file: expected at most {max_bytes:,} bytes", 413, "file")
    filename = (file.filename or "file")[-MAX_FILENAME:]
    if key is None:
        record, is_new = service.files.add(file.file, filename, "batch", sender.name), True
    else:
        record, is_new = service.files.add_once(file.file, filename, sender.name, key)
    if is_new:
        service.audit.write(sender, "uploaded", record.id)
    return record


@router.get("")
def list_files(
    service: Served,
    owner: Owner,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    order: Order = "desc",
    purpose: str | None = None,
) -> Object:
    records, has_more = service.files.page(owner, after, limit, order, lambda file: purpose in (None, file.purpose))
    return page_object([file_object(record) for record in records], has_more)


@router.get("/{file_id}")
def retrieve(service: Served, owner: Owner, file_id: str) -> Object:
    return file_object(service.files.get(file_id, owner))


@router.delete("/{file_id}")
def delete(service: Served, sender: By, file_id: str) -> Object:
    service.delete_file(service.files.get(file_id, sender.name), sender)
    return {"id": file_id, "object": "file", "deleted": True}


@router.get("/{file_id}/content")
def content(request: Request, service: Served, sender: By, file_id: str) -> Response:
    """Return the bytes of a file or a range, so that downloads can resume.

    starlette's own range response needs a local path.
    """
    record = service.files.get(file_id, sender.name)
    tag, size, kind = f'"{record.created}-{record.num_bytes}"', record.num_bytes, "application/octet-stream"
    headers = {"ETag": tag, "Accept-Ranges": "bytes", "X-Content-Type-Options": "nosniff"}
    if request.method == "HEAD":
        service.files.check(record)
        return Response(media_type=kind, headers=headers | {"Content-Length": str(size)})
    part = asked_part(request.headers, size, tag)
    if part is not None and not part:
        return Response(status_code=416, headers=headers | {"Content-Range": f"bytes */{size}"})
    if part is not None:
        headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{size}"
    headers["Content-Length"] = str(size if part is None else len(part))
    pieces = _closed(service.files.content(record, part))
    service.audit.write(sender, "downloaded", file_id, num_bytes=int(headers["Content-Length"]))
    return StreamingResponse(pieces, 200 if part is None else 206, headers=headers, media_type=kind)


def asked_part(headers: Headers, size: int, tag: str) -> range | None:
    """Return the requested range, empty if outside the file; None for the whole file."""
    found = PART.fullmatch(headers.get("range", "").replace(" ", ""))
    if found is None or headers.get("if-range", tag) != tag:
        return None
    first, last = found.groups()
    if not first:
        return range(max(0, size - int(last)), size) if last else None
    if last and int(last) < int(first):
        return None
    return range(int(first), min(size, int(last) + 1) if last else size)


async def _closed(pieces: Generator[bytes, None, None]) -> AsyncIterator[bytes]:
    with closing(pieces):
        async for piece in iterate_in_threadpool(pieces):
            yield piece
