"""Tells clients that are still being answered that the server ends, where uvicorn would show a traceback of it."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftbatch.scheduler.serve.api.objects import error_response
from swiftbatch.scheduler.serve.refusals import RefusedError

ENDING = "the server ended before this request was done: look what became of it once it is there again"


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
