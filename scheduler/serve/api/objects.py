"""The objects that clients are sent, in the form of OpenAI's API; moments are whole seconds since the epoch.

A request that is refused before its body was read is read on for a while, so that clients that are still writing it get
to see why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from swiftbatch.scheduler.serve.batch_records import FileRecord, LineProblem
from swiftbatch.scheduler.serve.batch_status import Status
from swiftbatch.scheduler.serve.batches import Batch
from swiftbatch.scheduler.serve.refusals import RefusedError

Object = dict[str, Any]

HEADERS = {401: {"WWW-Authenticate": 'Bearer realm="swiftbatch"'}, 429: {"Retry-After": "10"}}  # by status
MOST_READ_BYTES, MOST_READ_SECONDS = 2**20, 2.0  # bounds for the body, which is read for nothing


def file_object(record: FileRecord) -> Object:
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": int(record.created),
        "expires_at": None,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: Batch, status: Status) -> Object:
    record = batch.record
    ended_at: Object = {f"{state}_at": None for state in ("completed", "failed", "expired", "cancelled")}
    if status.ended is not None:
        ended_at[f"{status.state}_at"] = _seconds(status.ended)
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": _errors(status.problems),
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": status.state,
        "output_file_id": status.output_file_id,
        "error_file_id": status.error_file_id,
        "created_at": int(record.created),
        "in_progress_at": _seconds(status.in_progress),
        "expires_at": int(record.expires),
        "finalizing_at": _seconds(status.finalizing),
        "cancelling_at": None if batch.cancellation is None else int(batch.cancellation.requested),
        **ended_at,
        "request_counts": status.counts.model_dump(),
        "metadata": record.metadata,
        "priority": record.priority,
    }


def page_object(data: Sequence[Object], has_more: bool) -> Object:
    return {
        "object": "list",
        "data": list(data),
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def error_response(error: RefusedError) -> JSONResponse:
    message = str(error).encode(errors="backslashreplace").decode()  # it may show what the client sent
    said = {"message": message, "type": error.kind, "param": error.param, "code": error.code}
    return JSONResponse({"error": said}, error.status, HEADERS.get(error.status))


def _errors(problems: Sequence[LineProblem]) -> Object | None:
    if not problems:
        return None
    data = [problem.model_dump() | {"param": None} for problem in problems]
    return {"object": "list", "data": data}


def _seconds(moment: float | None) -> int | None:
    return None if moment is None else int(moment)


async def refuse(error: RefusedError, scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(error)
    if not await _is_read(receive):
        response.headers["Connection"] = "close"
    await response(scope, receive, send)


async def _is_read(receive: Receive) -> bool:
    """Read the rest of a body, but not much of it. Return whether that was all."""
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(MOST_READ_SECONDS):
            while num_bytes <= MOST_READ_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return True
    return False
