"""Refuse a request before its body was read, so that clients that are still writing it get to see why."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import Receive, Scope, Send

from swiftbatch.scheduler.serve.api.objects import error_response
from swiftbatch.scheduler.serve.refusals import RefusedError

MOST_BYTES, MOST_SECONDS = 2**20, 2.0  # bounds for the body, which is read for nothing


async def refuse(error: RefusedError, scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(error)
    if not await _is_read(receive):
        response.headers["Connection"] = "close"
    await response(scope, receive, send)


async def _is_read(receive: Receive) -> bool:
    """Read the rest of a body, but not much of it. Return whether that was all."""
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(MOST_SECONDS):
            while num_bytes <= MOST_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return True
    return False
