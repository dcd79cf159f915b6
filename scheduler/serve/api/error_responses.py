"""Errors in the form of OpenAI's API: every answer that is one, and a refusal in front of the routes.

A request that is refused before its body was read is read on for a while, so that clients that are still writing it get
to see why.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from swiftbatch.jobs.errors import UserError
from swiftbatch.scheduler.serve.api.dependencies import service_of
from swiftbatch.scheduler.serve.client_errors import RefusedError

HEADERS = {401: {"WWW-Authenticate": 'Bearer realm="swiftbatch"'}, 429: {"Retry-After": "10"}}  # by status
MOST_READ_BYTES, MOST_READ_SECONDS = 2**20, 2.0  # bounds for the body, which is read for nothing
NO_JSON = "the body of the request could not be read as JSON"


def answer_errors(app: FastAPI) -> None:
    """Have the app answer errors of all kinds."""
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(UserError, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _broken)


def error_response(error: RefusedError) -> JSONResponse:
    message = str(error).encode(errors="backslashreplace").decode()  # it may show what the client sent
    said = {"message": message, "type": error.kind, "param": error.param, "code": error.code}
    return JSONResponse({"error": said}, error.status, HEADERS.get(error.status))


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


def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return error_response(error)


def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, UserError)
    return error_response(service_of(request).refusal(error))


def _invalid(_request: Request, error: Exception) -> Response:
    """A parameter or a body that is not of its form."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        found = f"{first['ctx']['error']} at character {first['loc'][-1]}"
        return error_response(RefusedError(f"{NO_JSON}: {found}", code="invalid_json"))
    names = [str(part) for part in first["loc"][1:]]
    param = names[0] if names else None
    return error_response(RefusedError(f"{param or 'body'}: {first['msg']}", param=param))


def _http(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(RefusedError(str(error.detail), error.status_code))


def _broken(_request: Request, _error: Exception) -> Response:
    return error_response(RefusedError("the server had an error while it worked on your request", 500))
