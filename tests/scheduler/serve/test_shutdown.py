"""A server's end answers open requests and shows no traceback."""

from __future__ import annotations

import logging
import socket
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import uvicorn

from swiftbatch.scheduler.serve.records.stored_objects import StoredFiles
from swiftbatch.scheduler.serve.routes.request_limits import Connection
from swiftbatch.scheduler.serve.server import make_app
from tests.scheduler.serve.api_parts import service_on

WAIT_SECONDS = 60
FILE = ("x.jsonl", b"{}\n")


def test_requests_that_the_end_cuts_off_are_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    app = make_app(service_on(tmp_path), only_loopback=True)
    server = uvicorn.Server(
        uvicorn.Config(app, http=Connection, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    is_asked, may_go_on = threading.Event(), threading.Event()

    def add(*_: object) -> None:
        is_asked.set()
        may_go_on.wait(WAIT_SECONDS)

    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client, ThreadPoolExecutor() as pool:
        file = client.files.create(file=FILE, purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata=None
        )
        monkeypatch.setattr(StoredFiles, "add", add)
        upload = pool.submit(client.files.create, file=FILE, purpose="batch")
        events = urllib.request.urlopen(f"{url}/batches/{batch.id}/events", timeout=WAIT_SECONDS)
        assert is_asked.wait(WAIT_SECONDS)
        server.should_exit = True
        with events:
            assert events.read() == b""
        with pytest.raises(openai.InternalServerError, match=r"503.*the server ended before this request was done"):
            upload.result()
        may_go_on.set()
    thread.join(WAIT_SECONDS)
    assert not [record for record in caplog.records if record.exc_info and record.levelno >= logging.ERROR]
