"""Clients that send too much are refused early and block nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from swiftbatch.scheduler.serve.batches.service import Service
from swiftbatch.scheduler.serve.routes import request_limits
from tests.scheduler.serve.api_parts import batch_of, client_of, service_on, upload


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return service_on(tmp_path_factory.mktemp("runs"), max_file_bytes=3 * 2**20)


@pytest.fixture(scope="module")
def client(service: Service) -> TestClient:
    return client_of(service)


@pytest.mark.parametrize(
    "headers", [{f"x-{number}": "x" for number in range(200)}, {"x": "x" * 40_000}, {"Authorization": "x" * 50_000}]
)
def test_floods_of_headers_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    assert client.get("/v1/files", headers=headers).status_code == 431


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 1_000_000,
        b'{"a":' * 200_000,
        b'{"metadata": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}",
        b'{"input_file_id": ' + b"9" * 900_000 + b"}",
        b"{" + b",".join(b'"%d": 1' % number for number in range(70_000)) + b"}",
        b'{"metadata": {' + b",".join(b'"%d": 1' % number for number in range(70_000)) + b"}}",
        b'{"metadata": {"a": "\\ud800"}}',
        b'{"input_file_id": "\\ud800", "endpoint": "/v1/completions", "completion_window": "24h"}',
        b"NaN",
        b"",
        b"\xff",
    ],
    ids=range(11),
)
@pytest.mark.timeout(120)  # it takes milliseconds
def test_json_bombs_are_refused_at_once(client: TestClient, body: bytes) -> None:
    answer = client.post("/v1/batches", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 5000


@pytest.mark.parametrize("body", [b"{nope", b'{"a": 1', b'{"a": 1,}', b"NOPE"])
def test_a_body_that_is_no_json_is_told_so_and_blames_no_parameter(client: TestClient, body: bytes) -> None:
    answer = client.post("/v1/batches", content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_json", None)
    assert error["message"].startswith("the body of the request could not be read as JSON: ")


@pytest.mark.parametrize("boundary", ["", '""', "x"])
def test_a_form_without_its_boundary_is_refused_in_silence(
    client: TestClient, boundary: str, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    answer = client.post("/v1/files", content=b"y", headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert caplog.records == []  # otherwise they appear on the server's stderr


def test_a_body_that_does_not_end_is_refused_and_leaves_nothing(client: TestClient, service: Service) -> None:
    num_files = len(service.files)

    def pieces() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(100):
            yield bytes(2**20)

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert client.post("/v1/files", content=pieces(), headers=headers).status_code == 413
    assert client.post("/v1/batches", content=pieces()).status_code == 413
    assert client.post("/v1/files", content=b"x", headers=headers | {"Content-Length": str(10**12)}).status_code == 413
    assert len(service.files) == num_files


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"data": {"purpose": "batch"}}, 415),
        ({"files": {"file": b"x"}}, 400),
        ({"files": {"other": b"x"}, "data": {"purpose": "batch"}}, 400),
        ({"files": [("file", b"x"), ("file", b"y")], "data": {"purpose": "batch"}}, 400),
        ({"files": {"file": b"x"}, "data": {f"f{number}": "x" for number in range(20)}}, 400),
        ({"files": {"file": b"x"}, "data": {"purpose": "x" * 100_000}}, 400),
        ({"content": b"--x", "headers": {"Content-Type": "multipart/form-data"}}, 400),
    ],
)
def test_forms_hold_one_file_and_little_else(client: TestClient, form: dict[str, Any], status: int) -> None:
    found = client.post("/v1/files", **form)
    assert found.status_code == status
    assert found.json()["error"]["message"]


def test_metadata_is_as_long_as_openai_has_it(client: TestClient) -> None:
    good = {f"{number:064}": "x" * 512 for number in range(16)}
    file_id = upload(client)
    assert client.post("/v1/batches", json=batch_of(file_id, metadata=good)).json()["metadata"] == good
    for bad in (good | {"one": "more"}, {"x" * 65: ""}, {"x": "x" * 513}, {"x": 1}):
        assert client.post("/v1/batches", json=batch_of(file_id, metadata=bad)).status_code == 400


def test_no_key_takes_all_places(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limits, "MAX_REQUESTS", 0)
    assert client_of(service).get("/v1/files").status_code == 429
    monkeypatch.setattr(request_limits, "MAX_REQUESTS", 1)
    monkeypatch.setattr(request_limits, "MAX_UPLOADS", 0)
    client = client_of(service)
    assert client.get("/v1/files").status_code == 200
    answer = client.post("/v1/files", files={"file": b"x"}, data={"purpose": "batch"})
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "10")
    assert client.get("/v1/files").status_code == 200  # places are given back
    assert json.loads(answer.text)["error"]["code"] == "rate_limit"
