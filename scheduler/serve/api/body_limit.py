"""Bounds how far a request's body is read, whether it says its length or not, and for how long."""

from __future__ import annotations

from collections.abc import Set

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftbatch.scheduler.serve.bounds.pace import Pace

MOST_BYTES = 2**20  # of a body that is no upload
SLACK_BYTES = 2**16  # of an upload, for what is around the file


class BodyLimit:
    """Refuses longer bodies with status 413 when they are read, and slow ones with 408."""

    def __init__(self, app: ASGIApp, upload_paths: Set[str], max_file_bytes: int) -> None:
        self._app = app
        self._upload_paths = upload_paths
        self._max_file_bytes = max_file_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_upload = scope["path"] in self._upload_paths
        most = self._max_file_bytes + SLACK_BYTES if is_upload else MOST_BYTES
        await self._app(scope, _limited(receive, most, _said_length(scope)), send)


def _limited(receive: Receive, most: int, said: int) -> Receive:
    num_bytes = 0
    pace = Pace()

    async def limited() -> Message:
        nonlocal num_bytes
        message = await pace.next(receive) if said <= most else {"type": "http.disconnect"}
        num_bytes += len(message.get("body", b""))
        if max(said, num_bytes) > most:
            raise HTTPException(413, f"the body is too long: expected at most {most:,} bytes")
        return message

    return limited


def _said_length(scope: Scope) -> int:
    """The length that the request says; 0 where it says none."""
    said = dict(scope["headers"]).get(b"content-length", b"0")
    return int(said) if said.isdigit() else 0
