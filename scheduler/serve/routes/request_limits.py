"""Limits of requests and connections, per key and in all.

At the server's end, open requests get an answer instead of uvicorn's traceback.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Set
from typing import Any

from fastapi import HTTPException
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from swiftbatch.metrics.server_counters import ServerCounters
from swiftbatch.scheduler.serve.records.audit_log import AuditLog
from swiftbatch.scheduler.serve.records.server_records import RefusedError
from swiftbatch.scheduler.serve.routes.responses import error_response, refuse, sender_in

MAX_REQUESTS = 250  # per key
MAX_UPLOADS = 8  # per key
MAX_UPLOADS_OF_ALL = 16  # each may hold a whole file in the temporary folder
WINDOW_SECONDS = 30.0
MIN_WINDOW_BYTES = 30 * 2**10  # per window, unless the body ends in it
TOO_SLOW = "expected at least {:,} bytes of the body in {:.0f} s"
MAX_BODY_BYTES = 2**20  # except uploads
SLACK_BYTES = 2**16  # of an upload, around the file


class RequestLimits:
    """Refuses excess requests with status 429, long bodies with 413 and slow ones with 408."""

    def __init__(self, app: ASGIApp, upload_paths: Set[str], max_file_bytes: int) -> None:
        self._app = app
        self._upload_paths = upload_paths
        self._max_file_bytes = max_file_bytes
        self._requests: Counter[str | None] = Counter()
        self._uploads: Counter[str | None] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        owner: str | None = scope["state"]["owner"]
        has_upload_path = scope["path"] in self._upload_paths
        is_upload = has_upload_path and scope["method"] == "POST"
        if self._requests[owner] >= MAX_REQUESTS or (is_upload and not self._has_room(owner)):
            await refuse(RefusedError("too many requests at a time", 429, code="rate_limit"), scope, receive, send)
            return
        most = self._max_file_bytes + SLACK_BYTES if has_upload_path else MAX_BODY_BYTES
        counts = [self._requests, self._uploads] if is_upload else [self._requests]
        for count in counts:
            count[owner] += 1
        try:
            await self._app(scope, LimitedBody(receive, most, _said_length(scope)), send)
        finally:
            for count in counts:
                count[owner] -= 1

    def _has_room(self, owner: str | None) -> bool:
        return self._uploads[owner] < MAX_UPLOADS and self._uploads.total() < MAX_UPLOADS_OF_ALL


def _said_length(scope: Scope) -> int:
    said = dict(scope["headers"]).get(b"content-length", b"0")
    return int(said) if said.isdigit() else 0


class LimitedBody:
    """Receives a body of at most `most` bytes, with a deadline for each window of them."""

    def __init__(self, receive: Receive, most: int, said: int) -> None:
        self._receive, self._most, self._said = receive, most, said
        self._num_bytes = self._num_window_bytes = 0
        self._waited = 0.0
        self._is_whole = False

    async def __call__(self) -> Message:
        """Return the next message. Raises HTTPException for a long or a slow body."""
        message = await self._next() if self._said <= self._most else {"type": "http.disconnect"}
        self._num_bytes += len(message.get("body", b""))
        if max(self._said, self._num_bytes) > self._most:
            raise HTTPException(413, f"the body is too long: expected at most {self._most:,} bytes")
        return message

    async def _next(self) -> Message:
        if self._is_whole:
            return await self._receive()
        started = time.monotonic()
        try:
            async with asyncio.timeout(WINDOW_SECONDS - self._waited):
                message = await self._receive()
        except TimeoutError:
            if self._num_window_bytes < MIN_WINDOW_BYTES:
                raise HTTPException(408, TOO_SLOW.format(MIN_WINDOW_BYTES, WINDOW_SECONDS)) from None
            self._waited, self._num_window_bytes = 0.0, 0
            return await self._next()
        self._waited += time.monotonic() - started
        self._num_window_bytes += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._waited >= WINDOW_SECONDS:
            self._waited, self._num_window_bytes = 0.0, 0
        return message


BAD_REQUEST = 400  # the first status of refusals
HEAD_SECONDS = 60.0  # from the connection or last answer to the end of the next headers
READ_SECONDS = 60.0  # to read part of an answer that fills the buffers
ENDING = "the server ended before this request was done: look what became of it once it is there again"


class Connection(H11Protocol):
    """A uvicorn connection with timeouts for headers and readers."""

    _head: asyncio.TimerHandle | None = None
    _read: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head = self.loop.call_later(HEAD_SECONDS, self._cut)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._read):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def _watch_head(self) -> None:
        """Start the timeout while no request is being answered."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self._head is not None and is_answering:
            self._head.cancel()
            self._head = None
        elif self._head is None and not is_answering and not self.transport.is_closing():
            self._head = self.loop.call_later(HEAD_SECONDS, self._cut)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read = self.loop.call_later(READ_SECONDS, self._cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read is not None:
            self._read.cancel()
            self._read = None

    def _cut(self) -> None:
        self.transport.abort()


class Responses:
    """Counts responses when they begin, notes refusals, and answers with status 503 when the server ends."""

    def __init__(self, app: ASGIApp, counters: ServerCounters, audit: AuditLog) -> None:
        self._app = app
        self._counters, self._audit = counters, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: list[tuple[bytes, bytes]] | None = None

        async def noted(message: Message) -> None:
            nonlocal headers
            if message["type"] == "http.response.start":
                headers = message.get("headers", [])
                self._counters.count_request(message["status"])
                if message["status"] >= BAD_REQUEST:
                    request = f"{scope['method']} {scope['path']}"
                    await run_in_threadpool(self._audit.refuse, sender_in(scope), request, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if headers is None:
                await error_response(RefusedError(ENDING, 503, code="server_ending"))(scope, receive, send)
            elif not any(name == b"content-length" for name, _ in headers):  # so that a download shows as torn
                await send({"type": "http.response.body"})
