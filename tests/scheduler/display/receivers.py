from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = bytes(range(32))
SECRET = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="  # of that key


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> dict[str, Any]:
        return dict(json.loads(self.body))


@dataclass
class Inbox:
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)

    def wait_for(self, num_requests: int) -> list[Request]:
        deadline = time.monotonic() + 120
        while len(self.requests) < num_requests and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.requests


class Handler(BaseHTTPRequestHandler):
    inbox: Inbox
    answer: Callable[[Handler, int], None]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.inbox.requests.append(Request(self.path, headers, body))
        type(self).answer(self, len(self.inbox.requests))

    do_GET = do_POST  # noqa: N815  # a client that followed a redirect would send one

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def receiver(answer: Callable[[Any, int], None], tls: ssl.SSLContext | None = None) -> Iterator[Inbox]:
    """Call `answer` with each request's handler and number, from 1; `tls` means https."""
    inbox = Inbox()
    handler = type("OneHandler", (Handler,), {"inbox": inbox, "answer": staticmethod(answer)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads, server.block_on_close = True, False
    server.handle_error = lambda request, address: None  # clients that hang up
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    inbox.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}/hooks?key=hidden"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield inbox
    finally:
        inbox.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def status(*codes: int) -> Callable[[Any, int], None]:
    """Answer with these status codes in turn, then with the last one."""

    def answer(handler: Any, number: int) -> None:
        handler.send_response(codes[min(number, len(codes)) - 1])
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def silence(handler: Any, number: int) -> None:
    handler.inbox.closing.wait(60)


def slow_head(handler: Any, number: int) -> None:
    """Send an endless head, a byte at a time."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while not handler.inbox.closing.wait(0.05):
        handler.wfile.write(b"x")


def slow_body(handler: Any, number: int) -> None:
    """Answer well, with an endless body."""
    handler.send_response(200)
    handler.end_headers()
    while not handler.inbox.closing.wait(0.05):
        handler.wfile.write(b"x")


def redirect(handler: Any, number: int) -> None:
    handler.send_response(307)
    handler.send_header("Location", f"{handler.inbox.url}&again")
    handler.end_headers()
