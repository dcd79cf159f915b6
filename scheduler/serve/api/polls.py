"""Answers the requests that clients repeat again and again in front of FastAPI, where they would cost most."""

from __future__ import annotations

import re

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from swiftbatch.scheduler.serve.api.batch_routes import PAGE
from swiftbatch.scheduler.serve.api.objects import Object, batch_object, page_object
from swiftbatch.scheduler.serve.api.watching_routes import progress_object
from swiftbatch.scheduler.serve.batches import Batch
from swiftbatch.scheduler.serve.refusals import RefusedError
from swiftbatch.scheduler.serve.service import Service

LIST = "/v1/batches"
BATCH = re.compile(rf"{LIST}/([^/]+)(/progress)?")


class Polls:
    """Answers as the routes do, and no older, if nothing has to be read; all else is left to the routes.

    Behind the gate, which knows whose a request is.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_poll = scope["type"] == "http" and scope["method"] == "GET" and not scope["query_string"]
        found = self._found(scope["path"], scope["state"]["owner"]) if is_poll else None
        await (self._app if found is None else JSONResponse(found))(scope, receive, send)

    def _found(self, path: str, owner: str | None) -> Object | None:
        """The answer to a poll; None if the routes have to answer it."""
        if path == LIST:
            batches, has_more = self._service.batches.page(owner, None, PAGE, "desc")
            objects = [self._batch(batch) for batch in batches]
            return None if None in objects else page_object([each for each in objects if each], has_more)
        if (names := BATCH.fullmatch(path)) is None:
            return None
        try:
            batch = self._service.batches.get(names[1], owner)
        except RefusedError:
            return None
        return self._progress(batch) if names[2] else self._batch(batch)

    def _batch(self, batch: Batch) -> Object | None:
        status = self._service.remembered_status(batch)
        return None if status is None else batch_object(batch, status)

    def _progress(self, batch: Batch) -> Object | None:
        """The progress of a batch, or None if it has ended: then the routes read its newest heartbeat."""
        status = self._service.remembered_status(batch)
        if status is None or status.ended is not None:
            return None
        return progress_object(self._service, batch, status, status.progress)
