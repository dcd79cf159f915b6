"""The server as a process: it holds the runs, opens its port, answers, and ends in good order."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.runs.folder_hold import hold
from swiftbatch.scheduler.serve.api.app import make_app
from swiftbatch.scheduler.serve.api.bounds import Connection
from swiftbatch.scheduler.serve.api.gate import MOST_HEADER_BYTES, is_loopback
from swiftbatch.scheduler.serve.driving.batch_driver import DriverOptions
from swiftbatch.scheduler.serve.options import ServeOptions
from swiftbatch.scheduler.serve.service import Service

BACKLOG = 512
MAX_CONNECTIONS = 1000
IDLE_SECONDS = 75
END_SECONDS = 5  # for requests that are being answered


class ServeError(UserError):
    """The server can't be started, or had to end."""


def serve(
    runs: Store, options: ServeOptions, driver_options: DriverOptions, is_patient: bool, tell: Callable[[str], None]
) -> None:
    """Serve a folder of runs until a signal comes. Raises FolderHeldError, KeyFileError, ServeError, StoreError."""
    _refuse_strangers(options)
    faults: list[Exception] = []
    with _listening(options.host, options.port) as listening, hold(runs, is_patient, "serve") as held:

        def fail(error: Exception) -> None:
            faults.append(error)
            server.should_exit = True

        service = Service(runs, options, driver_options, held.check, fail)
        server = uvicorn.Server(_config(make_app(service, is_loopback(options.host))))
        tell(_first_line(listening, service))
        service.start()
        try:
            server.run(sockets=[listening])
        finally:
            service.stop()
    if faults:
        raise faults[0]


def _config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        log_level="error",  # errors of clients are theirs to read
        access_log=False,
        lifespan="off",
        server_header=False,
        http=Connection,
        ws="none",
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
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
    """A socket that listens. Raises ServeError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else answers of two packets wait for 40 ms
        return listening
    except OSError as error:
        problem = error.strerror or str(error)
        raise ServeError(f"--host {host} --port {port}: {problem}; choose others, or port 0 for any free one") from None


def _refuse_strangers(options: ServeOptions) -> None:
    """Raise ServeError if others reach the port without keys, where they may do anything, and this was not said."""
    if options.api_keys is not None and options.is_open:
        raise ServeError("--api-keys and --no-keys: expected at most one of them")
    if options.api_keys is None and not options.is_open and not is_loopback(options.host):
        raise ServeError(
            f"--host {options.host}: expected --api-keys FILE with it, since others reach this address; "
            "--no-keys says that everybody who does may use it"
        )
