"""Shared parts of all routes: a request's service and owner, and responses in the form of OpenAI's API."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from swiftbatch.jobs.errors import UserError
from swiftbatch.scheduler.serve.batches.service import Service
from swiftbatch.scheduler.serve.records.audit_log import Sender
from swiftbatch.scheduler.serve.records.batch_status import Status
from swiftbatch.scheduler.serve.records.server_records import FileRecord, LineProblem, RefusedError
from swiftbatch.scheduler.serve.records.stored_objects import Batch

Object = dict[str, Any]


class HeadRoute(APIRoute):
    """Answers HEAD as GET; the server leaves the body out."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.methods is not None and "GET" in self.methods:
            self.methods.add("HEAD")


MAX_IDEMPOTENCY_KEY = 255


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def served(request: Request) -> Service:  # `async` saves a thread, also below
    return service_of(request)


async def owner_of(request: Request) -> str | None:
    """Return the owner that access control found; None without keys."""
    owner: str | None = request.state.owner
    return owner


def sender_in(scope: Scope) -> Sender:
    """Return a request's sender, without a name before access control found one."""
    return Sender(scope.get("state", {}).get("owner"), (scope["client"] or ("",))[0])


async def sender_of(request: Request) -> Sender:
    return sender_in(request.scope)


async def key_of(request: Request) -> str | None:
    """Return a request's idempotency key, if any. Raises RefusedError."""
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= MAX_IDEMPOTENCY_KEY:
        raise RefusedError(
            f"Idempotency-Key: found {len(key):,} characters, expected 1 to {MAX_IDEMPOTENCY_KEY}",
            param="Idempotency-Key",
        )
    return key


Served = Annotated[Service, Depends(served)]
Owner = Annotated[str | None, Depends(owner_of)]
By = Annotated[Sender, Depends(sender_of)]
Key = Annotated[str | None, Depends(key_of)]


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
        "model": status.model,
        "usage": _usage(status),
    }


def page_object(data: Sequence[Object], has_more: bool) -> Object:
    return {
        "object": "list",
        "data": list(data),
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def _usage(status: Status) -> Object | None:
    """Return the tokens of the lines in the output file; None until it is written."""
    num_input, num_output = status.num_input_tokens, status.num_generated_tokens
    if num_input is None:
        return None
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": status.num_reasoning_tokens},
        "total_tokens": num_input + num_output,
    }


def _errors(problems: Sequence[LineProblem]) -> Object | None:
    data = [problem.model_dump() | {"param": None} for problem in problems]
    return {"object": "list", "data": data} if data else None


def _seconds(moment: float | None) -> int | None:
    return None if moment is None else int(moment)


# Errors in the form of OpenAI's API, also for refusals before the routes.


HEADERS = {401: {"WWW-Authenticate": 'Bearer realm="swiftbatch"'}, 429: {"Retry-After": "10"}}  # by status
MAX_READ_BYTES, MAX_READ_SECONDS = 2**20, 2.0  # limits for a body that is read only to discard it
NO_JSON = "the body of the request could not be read as JSON"


def answer_errors(app: FastAPI) -> None:
    for kind in (UserError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, lambda request, error: error_response(refusal_of(request, error)))


def refusal_of(request: Request, error: Exception) -> RefusedError:
    if isinstance(error, UserError):
        return service_of(request).refusal(error)
    if isinstance(error, HTTPException):
        return RefusedError(str(error.detail), error.status_code)
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    return RefusedError("the server had an error while it worked on your request", 500)


def _invalid(error: RequestValidationError) -> RefusedError:
    """Name the parameter or body with a wrong form."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        found = f"{first['ctx']['error']} at character {first['loc'][-1]}"
        return RefusedError(f"{NO_JSON}: {found}", code="invalid_json")
    param = next(map(str, first["loc"][1:]), None)
    return RefusedError(f"{param or 'body'}: {first['msg']}", param=param)


def error_response(error: RefusedError) -> JSONResponse:
    message = str(error).encode(errors="backslashreplace").decode()  # it may quote the client
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    said = {"message": message, "type": kind, "param": error.param, "code": error.code}
    return JSONResponse({"error": said}, error.status, HEADERS.get(error.status))


async def refuse(error: RefusedError, scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(error)
    if not await _is_read(receive):
        response.headers["Connection"] = "close"
    await response(scope, receive, send)


async def _is_read(receive: Receive) -> bool:
    """Read a limited rest of a body; return whether that was all."""
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(MAX_READ_SECONDS):
            while num_bytes <= MAX_READ_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return True
    return False
