"""Each action leaves one line that says who did it, before it is answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient

from swiftbatch.jobs.storage.store import Store, StoreError
from swiftbatch.scheduler.serve.records import audit_log
from swiftbatch.scheduler.serve.records.api_keys import make_key
from swiftbatch.scheduler.serve.records.audit_log import AuditLog, Sender
from swiftbatch.scheduler.serve.server import make_app, make_config
from tests.scheduler.serve.api_parts import batch_of, bearer, client_of, service_on, upload
from tests.scheduler.serve.pages.page_parts import token_of

SECRET, LINE = make_key("alice")
BOB_SECRET, BOB_LINE = make_key("bob")
ALICE, BOB = bearer(SECRET), bearer(BOB_SECRET)
SENDER = Sender("alice", "127.0.0.1")


def lines_of(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "audit").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def client(runs: Path, tmp_path: Path) -> TestClient:
    (tmp_path / "keys").write_text(f"{LINE}\n{BOB_LINE} metrics=yes\n")
    return client_of(service_on(runs, api_keys=str(tmp_path / "keys")))


@pytest.fixture
def news(runs: Path) -> Callable[[], list[tuple[Any, ...]]]:
    """Returns new lines without times."""
    num_known = 0

    def read() -> list[tuple[Any, ...]]:
        nonlocal num_known
        lines = lines_of(runs)[num_known:]
        num_known += len(lines)
        assert all(line["address"] == "testclient" and line["time"].endswith("+00:00") for line in lines)
        return [(line["key"], line["action"], line["id"], line.get("status")) for line in lines]

    return read


def test_every_action_is_one_line(client: TestClient, news: Callable[[], list[tuple[Any, ...]]], runs: Path) -> None:
    once = {"Idempotency-Key": "1"}
    file_ids = [upload(client, ALICE | once, b"data\n") for _ in range(2)]
    file_id = file_ids[0]
    assert news() == [("alice", "uploaded", file_id, None)]  # the second is the first again
    created = [client.post("/v1/batches", json=batch_of(file_id), headers=ALICE | once).json() for _ in range(2)]
    batch_id = created[0]["id"]
    assert news() == [("alice", "created", batch_id, None)]
    content = f"/v1/files/{file_id}/content"
    for headers in ({}, {"Range": "bytes=1-2"}):
        client.get(content, headers=ALICE | headers)
    client.head(content, headers=ALICE)
    assert news() == [("alice", "downloaded", file_id, None)] * 2
    assert [line.get("num_bytes") for line in lines_of(runs)] == [None, None, 5, 2]
    for path in ("", f"/{batch_id}", f"/{batch_id}/progress"):
        assert client.get(f"/v1/batches{path}", headers=ALICE).status_code == 200
    assert news() == []
    client.delete(f"/v1/files/{file_id}", headers=ALICE)
    assert news() == [("alice", "refused", file_id, 409)]
    for _ in range(2):
        client.post(f"/v1/batches/{batch_id}/cancel", headers=ALICE)
    assert news() == [("alice", "cancelled", batch_id, None)]
    assert json.loads((runs / "batches" / batch_id / "cancel.json").read_text())["requested_by"] == "alice"
    other = upload(client, BOB)
    client.delete(f"/v1/files/{other}", headers=BOB)
    assert news() == [("bob", "uploaded", other, None), ("bob", "deleted", other, None)]


def test_every_refusal_is_one_line(client: TestClient, news: Callable[[], list[tuple[Any, ...]]], runs: Path) -> None:
    file_id = upload(client, ALICE)
    news()
    refused: tuple[tuple[str, str, dict[str, str], tuple[Any, ...]], ...] = (
        ("GET", f"/v1/files/{file_id}/content", {}, (None, file_id, 401)),
        ("GET", f"/v1/files/{file_id}/content", BOB, ("bob", file_id, 404)),
        ("DELETE", f"/v1/files/{file_id}", BOB, ("bob", file_id, 404)),
        ("POST", "/v1/batches", bearer("sb_wrong"), (None, None, 401)),
        ("POST", "/v1/batches", ALICE, ("alice", None, 400)),
        ("GET", "/metrics", ALICE, ("alice", None, 403)),
        ("PUT", "/" + "x" * 1000, ALICE, ("alice", None, 404)),
        ("POST", "/v1/files", ALICE | {"Origin": "http://evil.example"}, (None, None, 403)),
    )
    for method, path, headers, (name, object_id, status) in refused:
        assert client.request(method, path, headers=headers).status_code == status
        assert news() == [(name, "refused", object_id, status)]
    assert [line["request"] for line in lines_of(runs)[-3:]] == ["GET /metrics", f"PUT /{'x' * 195}", "POST /v1/files"]


def test_the_page_s_actions_are_those_of_its_visitor(
    client: TestClient, news: Callable[[], list[tuple[Any, ...]]]
) -> None:
    token = token_of(client, "/login")
    client.post("/login", data={"form_token": token, "key": "sb_wrong"})
    assert news() == [(None, "refused", None, 401)]
    client.post("/login", data={"form_token": token, "key": SECRET})
    form = {"form_token": token_of(client), "window": "1h", "endpoint": "/v1/completions"}
    page = client.post("/", data=form, files={"file": ("x.jsonl", b"{}\n")})
    batch_id = page.url.path.removeprefix("/batches/")
    uploaded, made = news()
    assert (uploaded[:2], made) == (("alice", "uploaded"), ("alice", "created", batch_id, None))
    client.post("/", data=form | {"window": "never"}, files={"file": ("x.jsonl", b"{}\n")})
    assert [line[1] for line in news()] == ["uploaded", "deleted", "refused"]
    client.post(f"/batches/{batch_id}/cancel", data=form)
    assert news() == [("alice", "cancelled", batch_id, None)]


def test_strangers_cannot_fill_the_disk(client: TestClient, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "MAX_UNKNOWN", 3)
    monkeypatch.setattr("swiftbatch.scheduler.serve.records.audit_log.time.time", lambda: 1e9)
    for _ in range(9):
        client.get("/v1/files")
        client.get("/v1/files/none", headers=ALICE)
    assert [line["key"] for line in lines_of(runs)].count(None) == 3
    assert [line["key"] for line in lines_of(runs)].count("alice") == 9


@pytest.mark.parametrize(
    ("trusted", "address"),
    [(None, "127.0.0.1"), ("", "127.0.0.1"), ("10.0.0.9", "127.0.0.1"), ("127.0.0.1", "203.0.113.7")],
)
def test_only_a_trusted_proxy_names_the_client(
    runs: Path, trusted: str | None, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    if trusted is not None:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    config = make_config(make_app(service_on(runs), only_loopback=True))
    config.load()
    client = TestClient(config.loaded_app, base_url="http://127.0.0.1", client=("127.0.0.1", 50000))
    assert client.get("/none", headers={"X-Forwarded-For": "203.0.113.7"}).status_code == 404
    assert [line["address"] for line in lines_of(runs)] == [address]


def test_no_path_changes_how_a_line_is_shown(client: TestClient, runs: Path) -> None:
    path = "/\u202efdp\u200b\u0085\x1b[2J\x7f\U000e0041\u00e9"
    assert client.get(quote(path), headers=ALICE).status_code == 404
    [file] = (runs / "audit").iterdir()
    text = file.read_bytes().removesuffix(b"\n").decode("ascii")
    assert text.isprintable()
    assert json.loads(text)["request"] == f"GET {path}"


def test_a_full_file_is_followed_by_another_and_none_is_changed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "MAX_BYTES", 400)
    for _ in range(2):
        log = AuditLog(Store(str(tmp_path)), has_keys=True)
        for number in range(7):
            log.write(SENDER, "created", f"batch_{number}")
    assert [line["id"] for line in lines_of(tmp_path)] == [f"batch_{number}" for number in range(7)] * 2
    sizes = [file.stat().st_size for file in (tmp_path / "audit").iterdir()]
    assert len(sizes) > 4
    assert max(sizes) <= 400


def test_a_line_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "audit").write_text("no folder")
    log = AuditLog(Store(str(tmp_path)), has_keys=True)
    with pytest.raises(StoreError, match="cannot write the audit log audit: "):
        log.write(SENDER, "created", "batch_1")
    log.refuse(SENDER, "GET /", 404)  # the answer says no already


def test_on_an_object_store_each_line_is_an_object(s3_uri: str) -> None:
    store = Store(s3_uri)
    log = AuditLog(store, has_keys=True)
    log.write(SENDER, "created", "batch_1")
    log.write(SENDER, "cancelled", "batch_1")
    lines = [json.loads(store.read(f"audit/{name}") or b"") for name in sorted(store.list("audit"))]
    assert [line["action"] for line in lines] == ["created", "cancelled"]
