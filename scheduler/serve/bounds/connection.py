"""A client's connection: it is cut off where the next request, or the reading of an answer, takes too long."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 60.0  # from the connection, or the last answer, to the end of the next request's headers
READ_SECONDS = 60.0  # in which a client has to read some of an answer that fills its buffers


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
