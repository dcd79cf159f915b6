from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uvicorn

from swiftbatch.scheduler.serve.routes import request_limits
from swiftbatch.scheduler.serve.server import make_app
from tests.scheduler.serve.api_parts import service_on

NUM_CLIENTS = 7
WAIT_SECONDS = 60
SOON = 1.0
LONG_BYTES = 30_000_000
POST = b"POST /v1/batches HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
OK = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, str]]:
    """The port of an impatient server, and the id of a long file."""
    for name in ("HEAD_SECONDS", "READ_SECONDS", "WINDOW_SECONDS"):
        monkeypatch.setattr(request_limits, name, SOON)
    service = service_on(tmp_path / "runs")
    file = service.files.add(io.BytesIO(bytes(LONG_BYTES)), "long", "batch", None)
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        make_app(service, True),
        http=request_limits.Connection,
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,  # otherwise a connected client delays the end of the tests
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield listening.getsockname()[1], file.id
    server.should_exit = True
    thread.join(WAIT_SECONDS)


def answer(port: int, pieces: Sequence[bytes], pause: float, pause_before_reading: float = 0.0) -> bytes:
    """Return everything until the server closes the connection.

    Raises TimeoutError.
    """
    found = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS) as client:
        try:
            for piece in pieces:
                client.sendall(piece)
                time.sleep(pause)
            time.sleep(pause_before_reading)
            while data := client.recv(2**20):
                found += data
        except TimeoutError:
            raise
        except OSError:
            pass
    return bytes(found)


def test_whoever_sends_or_reads_in_drops_is_cut_off(server: tuple[int, str]) -> None:
    port, file_id = server
    download = f"GET /v1/files/{file_id}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    drops = [b"x"] * 20
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        silent = pool.submit(answer, port, [], 0)
        torn_head = pool.submit(answer, port, [b"GET / HTTP/1.1\r\nHo"], 0)
        head_in_drops = pool.submit(answer, port, [b"GET / HTTP/1.1\r\nX: ", *drops], SOON / 5)
        after_another = pool.submit(answer, port, [OK + b"GE"], 0)
        torn_body = pool.submit(answer, port, [POST + b"Content-Length: 100\r\n\r\na few"], 0)
        chunks = [POST + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\n[\r\n"] * 20]
        body_in_drops = pool.submit(answer, port, chunks, SOON / 5)
        no_reader = pool.submit(answer, port, [download], 0, 4 * SOON)
    assert silent.result() == torn_head.result() == head_in_drops.result() == b""
    assert after_another.result().count(b"HTTP/1.1 200") == 1
    assert torn_body.result().startswith(b"HTTP/1.1 408")
    assert body_in_drops.result()[:12] in (b"HTTP/1.1 408", b"")  # the answer is lost if more drops follow
    assert len(no_reader.result()) < LONG_BYTES
