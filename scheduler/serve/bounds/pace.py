"""Bounds how slowly a request's body may come."""

from __future__ import annotations

import asyncio
import time

from fastapi import HTTPException
from starlette.types import Message, Receive

WINDOW_SECONDS = 30.0
LEAST_BYTES = 30 * 2**10  # in each window, unless the body ends there


class Pace:
    """Takes the pieces of a body, each within what is left of a window. What the server itself takes does not count."""

    def __init__(self) -> None:
        self._waited = 0.0
        self._num_bytes = 0
        self._is_whole = False

    async def next(self, receive: Receive) -> Message:
        """The next message; once the body is whole, however long it takes. Raises HTTPException for a slow body."""
        if self._is_whole:
            return await receive()
        started = time.monotonic()
        try:
            async with asyncio.timeout(WINDOW_SECONDS - self._waited):
                message = await receive()
        except TimeoutError:
            if self._num_bytes < LEAST_BYTES:
                raise _too_slow() from None
            self._begin_window()
            return await self.next(receive)
        self._waited += time.monotonic() - started
        self._num_bytes += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._waited >= WINDOW_SECONDS:
            self._begin_window()
        return message

    def _begin_window(self) -> None:
        self._waited, self._num_bytes = 0.0, 0


def _too_slow() -> HTTPException:
    return HTTPException(408, f"expected at least {LEAST_BYTES:,} bytes of the body in {WINDOW_SECONDS:.0f} s")
