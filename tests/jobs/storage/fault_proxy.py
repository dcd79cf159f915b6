"""An HTTP proxy that loses, refuses and delays requests: a bad network, or a bad day of an object store."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Literal

Fault = Literal["unavailable", "denied", "unknown", "conflict", "refused", "lost", "cut"]
HOP_HEADERS = {"connection", "transfer-encoding", "content-length", "expect", "keep-alive"}
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
PIECE_BYTES = 2**16

ERROR = "<?xml version='1.0' encoding='UTF-8'?><Error><Code>{}</Code><Message>As the test wants it.</Message></Error>"
ERRORS = {
    "unavailable": (503, "ServiceUnavailable"),
    "denied": (403, "AccessDenied"),
    "unknown": (501, "NotImplemented"),
    "conflict": (409, "ConditionalRequestConflict"),
}


class FaultProxy:
    """Stands before `upstream` (host:port) and forwards what it does not harm. All chances come from `seed`.

    `chances` holds the probability of each fault: `unavailable` is a 503, `denied` a 403, `unknown` a 501, `conflict` a
    409, `refused` a reset before the request is forwarded, `lost` one after it was carried out, `cut` one in the middle
    of the answer. A `choose` of
    one's own picks by method and path.
    """

    def __init__(self, upstream: str, seed: int = 0) -> None:
        self.chances: dict[Fault, float] = {}
        self.choose: Callable[[str, str], Fault | None] = self._by_chance
        self.num_faults: Counter[str] = Counter()
        self.requests: list[str] = []  # "METHOD path?query" of each that arrived
        self.num_without_length = 0  # requests whose body came in chunks
        self.access_keys: set[str] = set()  # with which requests were signed; "" for none
        self.hidden_headers: set[str] = set()  # in small letters, for a server that doesn't know them
        self.delay: Callable[[str, str], float] = lambda method, path: 0.0  # seconds, while others are served
        self.seconds_a_piece = 0.0  # for which a slow line takes each PIECE_BYTES of a body
        self._random = Random(seed)
        self._lock = threading.Lock()
        self._light = threading.Event()
        self._light.set()
        self._server = _Server(("127.0.0.1", 0), upstream, self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def fail_at(self, number: int, fault: Fault) -> None:
        """Harm the request of this number, counted from 0 and from now on, and no other."""
        numbers = itertools.count()
        self.choose = lambda method, path: fault if next(numbers) == number else None

    @contextmanager
    def dark(self) -> Iterator[None]:
        """Meanwhile requests are taken and never answered."""
        self._light.clear()
        try:
            yield
        finally:
            self._light.set()

    def go_dark(self, seconds: float) -> None:
        """Make it dark for so many seconds, as `dark` does, without waiting for the end."""
        self._light.clear()
        threading.Timer(seconds, self._light.set).start()

    def close(self) -> None:
        self._light.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fault_for(self, method: str, path: str) -> Fault | None:
        """Return the fault that a request meets, if any; wait while it is dark."""
        with self._lock:
            self.requests.append(f"{method} {path}")
            fault: Fault | None = self.choose(method, path)
        if not self._light.is_set():
            self._light.wait()
            fault = "refused"
        if fault is not None:
            with self._lock:
                self.num_faults[fault] += 1
        return fault

    def _by_chance(self, method: str, path: str) -> Fault | None:
        point = self._random.random()
        for fault, chance in self.chances.items():
            if point < chance:
                return fault
            point -= chance
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], upstream: str, proxy: FaultProxy) -> None:
        super().__init__(address, _Handler)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)  # a slow line is seen at the other end
        self.upstream = upstream
        self.proxy = proxy

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that gave up is nothing to speak of."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def handle_any(self) -> None:
        signature = self.headers.get("Authorization", "").partition("Credential=")[2]
        self.server.proxy.access_keys.add(signature.partition("/")[0])
        body = self._body()
        fault = self.server.proxy.fault_for(self.command, self.path)
        time.sleep(self.server.proxy.delay(self.command, self.path))
        if fault == "refused":
            return self._reset()
        if fault in ERRORS:
            status, code = ERRORS[fault]
            return self._answer(status, {"Content-Type": "application/xml"}, ERROR.format(code).encode())
        status, headers, content = self._forward(body)
        if fault == "lost":
            return self._reset()
        if fault == "cut" and content:
            self._answer(status, headers, content, len(content) // 2)
            return self._reset()
        return self._answer(status, headers, content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Nothing: the tests look at `requests`."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return b"".join(self._pieces(int(self.headers.get("Content-Length", 0))))
        self.server.proxy.num_without_length += 1
        body = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():  # trailers of the transfer
            pass
        return body

    def _pieces(self, size: int) -> Iterator[bytes]:
        for start in range(0, size, PIECE_BYTES):
            time.sleep(self.server.proxy.seconds_a_piece)
            yield self.rfile.read(min(PIECE_BYTES, size - start))

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        host, port = self.server.upstream.split(":")
        connection = HTTPConnection(host, int(port), timeout=60)
        try:
            left_out = HOP_HEADERS | self.server.proxy.hidden_headers
            headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
            connection.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
            answer = connection.getresponse()
            content = answer.read()
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in HOP_HEADERS}
            length = answer.getheader("Content-Length") if self.command == "HEAD" else None
            return answer.status, kept | {"Content-Length": length or str(len(content))}, content
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], content: bytes, num_bytes: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:num_bytes])

    def _reset(self) -> None:
        """Close in a way that the other side sees as "connection reset by peer"."""
        time.sleep(0.001)
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.close_connection = True
        self.connection.close()
