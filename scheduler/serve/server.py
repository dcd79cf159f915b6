"""The HTTP server: routes, middleware, start and orderly end."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Receive, Scope, Send

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.storage.store import Store
from swiftbatch.metrics import exporter
from swiftbatch.metrics.exporter import registry_of, server_families
from swiftbatch.scheduler.runs.folder_lock import hold
from swiftbatch.scheduler.runs.run_settings import ServeOptions
from swiftbatch.scheduler.serve.batches.batch_driver import DriverOptions
from swiftbatch.scheduler.serve.batches.service import Service
from swiftbatch.scheduler.serve.pages import page_routes
from swiftbatch.scheduler.serve.records.server_records import RefusedError
from swiftbatch.scheduler.serve.routes import batch_routes, file_routes
from swiftbatch.scheduler.serve.routes.access_control import MAX_HEADER_BYTES, AccessControl, Sessions, is_loopback
from swiftbatch.scheduler.serve.routes.batch_routes import DEFAULT_PAGE, progress_object
from swiftbatch.scheduler.serve.routes.request_limits import Connection, RequestLimits, Responses
from swiftbatch.scheduler.serve.routes.responses import (
    HeadRoute,
    Object,
    Served,
    answer_errors,
    batch_object,
    page_object,
)

LIST = "/v1/batches"
BATCH = re.compile(rf"{LIST}/([^/]+)(/progress)?")

UPLOAD_PATHS = frozenset({file_routes.PATH, page_routes.UPLOAD_PATH})

server_router = APIRouter(route_class=HeadRoute)  # for operators: health, readiness, metrics, drivers
models_router = APIRouter(prefix="/v1/models", route_class=HeadRoute)


class Polls:
    """Answers frequent requests before FastAPI, where they would cost most.

    Anything that needs reading goes to the routes.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_poll = scope["type"] == "http" and scope["method"] == "GET" and not scope["query_string"]
        found = self._found(scope["path"], scope["state"]["owner"]) if is_poll else None
        await (self._app if found is None else JSONResponse(found))(scope, receive, send)

    def _found(self, path: str, owner: str | None) -> Object | None:
        """Return the answer to a poll; None if the routes must answer."""
        if path == LIST:
            batches, has_more = self._service.batches.page(owner, None, DEFAULT_PAGE)
            found = [(batch, self._service.remembered_status(batch)) for batch in batches]
            objects = [batch_object(batch, status) for batch, status in found if status is not None]
            return page_object(objects, has_more) if len(objects) == len(found) else None
        names = BATCH.fullmatch(path)
        batch = None if names is None else self._service.batches.find(names[1], owner)
        status = None if batch is None else self._service.remembered_status(batch)
        if names is None or batch is None or status is None:
            return None
        if not names[2]:
            return batch_object(batch, status)
        return None if status.ended else progress_object(self._service, batch, status, status.progress)


def _model_objects(service: Service) -> dict[str, Object]:
    """Return the model and its adapters by id, as vLLM tells of them."""
    same = {"object": "model", "created": int(service.started), "owned_by": "swiftbatch"}
    found = {name: {"id": name, **same, "parent": service.model} for name in service.adapters}
    return {service.model: {"id": service.model, **same, "parent": None}} | found


@models_router.get("")
async def models(service: Served) -> Object:
    return {"object": "list", "data": [*_model_objects(service).values()]}


@models_router.get("/{model_id:path}")
async def model(service: Served, model_id: str) -> Object:
    if (found := _model_objects(service).get(model_id)) is None:
        raise RefusedError(f"The model {model_id[:80]!a} does not exist", 404, "model", "model_not_found")
    return found


@server_router.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@server_router.get("/readyz")
async def readyz(service: Served) -> dict[str, str]:
    if not service.keeper.is_alive():
        raise RefusedError("the server is ending", 503)
    return {"status": "ok"}


@server_router.get("/metrics")
def metrics(service: Served) -> Response:
    service.measure()
    return Response(
        generate_latest(registry_of(lambda: server_families(service.counters))), media_type=CONTENT_TYPE_LATEST
    )


@server_router.get(exporter.DISCOVERY_PATH)
def targets(service: Served) -> list[Any]:
    """List the drivers with metrics and their workers, one group per batch."""
    found: list[Any] = []
    for batch, driver in service.keeper.drivers():
        if driver.metrics_address is not None:
            progress = service.status(batch).progress
            workers = [] if progress is None else [worker.metrics_address for worker in progress.workers]
            addresses = [driver.metrics_address, *(address for address in workers if address is not None)]
            labels = {"run": batch.id, **service.team_labels(batch.owner)}
            found += json.loads(exporter.discovery_document(addresses, labels))
    return found


def make_app(service: Service, only_loopback: bool) -> FastAPI:
    """Make the app; `only_loopback` configures access control."""
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # clients' errors are answered, not logged
    app = FastAPI(title="swiftbatch", openapi_url=None, redirect_slashes=False)
    app.state.service = service
    app.state.sessions = Sessions()
    for routes in (file_routes, batch_routes, page_routes):
        app.include_router(routes.router)
    for router in (models_router, server_router):
        app.include_router(router)
    answer_errors(app)
    app.add_middleware(Polls, service=service)
    app.add_middleware(RequestLimits, upload_paths=UPLOAD_PATHS, max_file_bytes=service.max_file_bytes)
    app.add_middleware(AccessControl, keyring=service.keyring, sessions=app.state.sessions, only_loopback=only_loopback)
    app.add_middleware(Responses, counters=service.counters, audit=service.audit)
    return app


BACKLOG = 512
MAX_CONNECTIONS = 1000
IDLE_SECONDS = 75
END_SECONDS = 5  # for requests in progress


class ServeError(UserError):
    """A server that can't start or had to end."""


def serve(
    runs: Store, options: ServeOptions, driver_options: DriverOptions, is_patient: bool, tell: Callable[[str], None]
) -> None:
    """Serve a folder of runs until a signal. Raises FolderHeldError, ApiKeyError, ServeError, StoreError."""
    _refuse_strangers(options)
    faults: list[Exception] = []
    with _listening(options.host, options.port) as listening, hold(runs, is_patient, "serve") as held:

        def fail(error: Exception) -> None:
            faults.append(error)
            server.should_exit = True

        service = Service(runs, options, driver_options, held.check, fail)
        server = uvicorn.Server(make_config(make_app(service, is_loopback(options.host))))
        tell(_first_line(listening, service))
        service.start()
        try:
            server.run(sockets=[listening])
        finally:
            service.stop()
    if faults:
        raise faults[0]


def make_config(app: FastAPI) -> uvicorn.Config:
    """Make the server's configuration; forwarded headers count from the addresses in FORWARDED_ALLOW_IPS alone."""
    return uvicorn.Config(
        app,
        log_config=None,
        log_level="error",  # clients' errors are answered, not logged
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=bool(os.environ.get("FORWARDED_ALLOW_IPS")),  # uvicorn would trust every process on loopback
        http=Connection,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=END_SECONDS,
    )


def _first_line(listening: socket.socket, service: Service) -> str:
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    num_unfinished = len(service.batches.unfinished())
    return f"serving on http://{shown}:{port}, {len(service.batches):,} batches ({num_unfinished:,} unfinished)"


def _listening(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises ServeError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
        # otherwise two-packet answers take 40 ms longer
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        problem = error.strerror or str(error)
        raise ServeError(f"--host {host} --port {port}: {problem}; choose others, or port 0 for any free one") from None


def _refuse_strangers(options: ServeOptions) -> None:
    """Raise ServeError if the port is open to others without keys."""
    if options.api_keys is not None and options.is_open:
        raise ServeError("--api-keys and --no-keys: expected at most one of them")
    if options.api_keys is None and not options.is_open and not is_loopback(options.host):
        raise ServeError(
            f"--host {options.host}: expected --api-keys FILE with it, since others reach this address; "
            "--no-keys says that everybody who does may use it"
        )
