"""A client's connection: it is cut off where the next request, or the reading of an answer, takes too long.

Clients that are still being answered are told that the server ends, where uvicorn would show a traceback of it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from swiftbatch.scheduler.serve.api.error_responses import error_response
from swiftbatch.scheduler.serve.refusals import RefusedError

HEAD_SECONDS = 60.0  # from the connection, or the last answer, to the end of the next request's headers
READ_SECONDS = 60.0  # in which a client has to read some of an answer that fills its buffers
ENDING = "the server ended before this request was done: look what became of it once it is there again"


class Connection(H11Protocol):
    """A connection of uvicorn's, which by itself waits for headers and for readers without end."""

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
        """Have the time run while no request is being answered."""
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


class Shutdown:
    """Answers a request that the server's end cuts off with status 503; a stream that has begun just ends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: list[tuple[bytes, bytes]] | None = None

        async def noted(message: Message) -> None:
            nonlocal headers
            headers = message.get("headers", headers)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if headers is None:
                await error_response(RefusedError(ENDING, 503, code="server_ending"))(scope, receive, send)
            elif not any(name == b"content-length" for name, _ in headers):  # a download is to be seen as torn
                await send({"type": "http.response.body"})
