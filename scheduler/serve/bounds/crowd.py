"""Bounds how many requests are answered at a time, of one key and in all, so that none keeps the others out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from starlette.types import ASGIApp, Receive, Scope, Send

from swiftbatch.scheduler.serve.bounds.refusing import refuse
from swiftbatch.scheduler.serve.refusals import RefusedError

MOST_REQUESTS = 250  # of one key
MOST_UPLOADS = 8  # of one key
MOST_UPLOADS_OF_ALL = 16  # each may hold a whole file in the folder for temporary files


class Crowd:
    """Refuses what is too much at a time with status 429. Behind the gate, which knows whose a request is."""

    def __init__(self, app: ASGIApp, upload_paths: Set[str]) -> None:
        self._app = app
        self._upload_paths = upload_paths
        self._requests: Counter[str | None] = Counter()
        self._uploads: Counter[str | None] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        owner: str | None = scope["state"]["owner"]
        is_upload = scope["path"] in self._upload_paths and scope["method"] == "POST"
        if self._requests[owner] >= MOST_REQUESTS or (is_upload and not self._has_room(owner)):
            await refuse(RefusedError("too many requests at a time", 429, code="rate_limit"), scope, receive, send)
            return
        counts = [self._requests, self._uploads] if is_upload else [self._requests]
        for count in counts:
            count[owner] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            for count in counts:
                count[owner] -= 1

    def _has_room(self, owner: str | None) -> bool:
        return self._uploads[owner] < MOST_UPLOADS and self._uploads.total() < MOST_UPLOADS_OF_ALL
