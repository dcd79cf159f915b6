"""Counts every request by its answer, as plain ASGI: Starlette's own middleware costs a task for each request."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftbatch.metrics.server_counters import ServerCounters


class Counting:
    """Counts answers when they begin."""

    def __init__(self, app: ASGIApp, counters: ServerCounters) -> None:
        self._app = app
        self._counters = counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counters.count_request(message["status"])
            await send(message)

        await self._app(scope, receive, counted)
