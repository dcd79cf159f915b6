from __future__ import annotations

import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from swiftbatch.scheduler.serve.records import api_keys
from swiftbatch.scheduler.serve.records.api_keys import make_key
from swiftbatch.scheduler.serve.records.server_records import Counts, Ended
from swiftbatch.scheduler.serve.routes import access_control
from swiftbatch.scheduler.serve.routes.access_control import COOKIE, Sessions, new_session_id
from tests.scheduler.serve.pages.page_parts import ORIGIN, app_of, client_of, new_batch, service_of, token_of

SECRET, LINE = make_key("alice")
OTHER_SECRET, OTHER_LINE = make_key("bob")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"{LINE}\n{OTHER_LINE}\n")
    return path


@pytest.fixture
def client(tmp_path: Path, key_file: Path) -> TestClient:
    return client_of(app_of(tmp_path / "runs", key_file))


def log_in(client: TestClient, secret: str = SECRET) -> str:
    answer = client.post("/login", data={"key": f" {secret}\n", "form_token": token_of(client, "/login")})
    assert (answer.status_code, answer.headers["Location"]) == (303, "/")
    return str(client.cookies[COOKIE])


def is_in(client: TestClient) -> bool:
    answer = client.get("/")
    assert answer.status_code in (200, 303)
    assert answer.status_code == 200 or answer.headers["Location"] == "/login"
    return answer.status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("POST", "/"),
        ("GET", "/batches/batch_1"),
        ("POST", "/batches/b/cancel"),
        ("GET", "/batches/b/report"),
    ],
)
def test_without_a_login_all_leads_to_it(client: TestClient, method: str, path: str) -> None:
    answer = client.request(method, path, content=b"x" * 1000)
    assert (answer.status_code, answer.headers["Location"], answer.text) == (303, "/login", "")


def test_a_login_sets_a_cookie_that_says_nothing(client: TestClient) -> None:
    client.get("/login")
    before = client.cookies[COOKIE]
    token = token_of(client, "/login")
    answer = client.post("/login", data={"key": SECRET, "form_token": token})
    cookie = answer.headers["Set-Cookie"]
    assert {"HttpOnly", "Path=/", "SameSite=strict", f"Max-Age={12 * 3600}"} <= set(cookie.split("; "))
    assert "Secure" not in cookie
    assert SECRET not in cookie
    assert "alice" not in cookie
    assert client.cookies[COOKIE] != before  # nobody can plant a session that they know
    assert is_in(client)
    assert client.post("/logout", data={"form_token": token}).status_code == 403
    https = TestClient(client.app, base_url=ORIGIN.replace("http", "https"))
    assert "; Secure" in https.get("/login").headers["Set-Cookie"]


@pytest.mark.parametrize(
    "secret",
    ["", "none", SECRET[:-1], SECRET + "x", LINE, LINE.rpartition(":")[2]],
    ids=["nothing", "none", "cut short", "longer", "its line", "its hash"],  # equal in every process of a test run
)
def test_a_wrong_key_is_no_login(client: TestClient, secret: str) -> None:
    answer = client.post("/login", data={"key": secret, "form_token": token_of(client, "/login")})
    assert answer.status_code == 401
    assert "not known here" in answer.text
    assert not is_in(client)


def test_a_key_sees_its_own_batches_alone(client: TestClient) -> None:
    service = service_of(client)
    own, foreign = new_batch(service, "own.jsonl", owner="alice"), new_batch(service, "foreign.jsonl", owner="bob")
    log_in(client)
    page = client.get("/").text
    assert "own.jsonl" in page
    assert "foreign.jsonl" not in page
    assert "1 in all" in page
    assert client.get(f"/batches/{own.id}").status_code == 200
    for path in ("", "/report", "/output.jsonl"):
        absent = client.get(f"/batches/{foreign.id[:-1]}x{path}")
        answer = client.get(f"/batches/{foreign.id}{path}")
        assert answer.status_code == absent.status_code == 404
        assert answer.text.replace(foreign.id, "") == absent.text.replace(f"{foreign.id[:-1]}x", "")
    token = token_of(client)
    assert client.post(f"/batches/{foreign.id}/cancel", data={"form_token": token}).status_code == 404
    assert foreign.cancellation is None
    made = client.post(
        "/", data={"window": "1h", "endpoint": "/v1/completions", "form_token": token}, files={"file": b"{}"}
    )
    assert made.status_code == 303
    assert service.batches.page("alice", None, 9, "desc")[0][0].owner == "alice"


def test_a_batch_says_what_it_waits_for(tmp_path: Path, key_file: Path) -> None:
    key_file.write_text(f"{LINE} max_tokens_per_day=5\n")
    before = service_of(client_of(app_of(tmp_path / "runs", key_file)))
    times = {"in_progress": time.time() - 2, "finalizing": time.time() - 1, "ended": time.time() - 1}
    ended = Ended(state="completed", counts=Counts(), num_total_tokens=9, **times)
    before.batches.end(new_batch(before, owner="alice"), ended)
    client = client_of(app_of(tmp_path / "runs", key_file))
    log_in(client)
    said = {"window": "1h", "endpoint": "/v1/completions", "form_token": token_of(client)}
    made = client.post("/", data=said, files={"file": b"{}"})
    assert "its key has generated 9 tokens in 24 hours" in client.get(made.headers["Location"]).text


def test_a_session_is_no_key_of_the_api(client: TestClient) -> None:
    log_in(client)
    assert client.get("/v1/batches").status_code == 401


def test_a_logout_ends_the_session_everywhere(client: TestClient) -> None:
    session_id = log_in(client)
    assert client.post("/logout", data={"form_token": token_of(client)}).headers["Location"] == "/login"
    assert not is_in(client)
    client.cookies.set(COOKIE, session_id, domain="127.0.0.1", path="/")
    assert not is_in(client)


def test_a_session_ends_with_its_key_and_with_its_server(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "POLL_SECONDS", 0.0)
    client = client_of(app_of(tmp_path / "runs", key_file))
    session_id = log_in(client)
    next_one = client_of(app_of(tmp_path / "runs", key_file))
    next_one.cookies.set(COOKIE, session_id)
    assert not is_in(next_one)
    assert is_in(client)
    key_file.write_text(f"{OTHER_LINE}\n")
    assert not is_in(client)


def test_sessions_are_bounded_in_time_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_control, "MAX_SESSIONS", 2)
    kept = Sessions()
    first, second, third = (kept.begin(digest) for digest in "abc")
    assert [kept.key_digest(session_id) for session_id in (first, second, third)] == [None, "b", "c"]
    monkeypatch.setattr(access_control, "SESSION_SECONDS", 0)
    assert kept.key_digest(kept.begin("d")) is None


FORMS = [
    ("/", {"window": "1h", "endpoint": "/v1/completions"}),
    ("/batches/{}/cancel", {}),
    ("/login", {"key": SECRET}),
    ("/logout", {}),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("path", "said"), FORMS)
@pytest.mark.parametrize("token", ["", "x", "é", "0" * 64, "foreign", "file"])
def test_forms_of_others_are_refused(client: TestClient, path: str, said: dict[str, str], token: str) -> None:
    batch = new_batch(service_of(client), owner="alice")
    session_id = log_in(client)
    if token == "foreign":  # that of another session
        token = token_of(client_of(client.app), "/login")
    files = {"form_token": ("x", b"y")} if token == "file" else {"file": b"{}"}
    answer = client.post(path.format(batch.id), data=said | {"form_token": token}, files=files)
    assert answer.status_code in (400, 403)
    assert batch.cancellation is None
    assert len(service_of(client).batches) == 1
    assert client.cookies[COOKIE] == session_id
    assert is_in(client)


def test_without_keys_forms_carry_tokens_too(tmp_path: Path) -> None:
    client = client_of(app_of(tmp_path))
    batch = new_batch(service_of(client))
    assert client.get("/login").headers["Location"] == "/"
    token = token_of(client)
    client.cookies.clear()
    for headers in ({}, {"Cookie": f"{COOKIE}={new_session_id()}"}, {"Cookie": f"{COOKIE}=x"}):
        answer = client.post(f"/batches/{batch.id}/cancel", data={"form_token": token}, headers=headers)
        assert answer.status_code == 403
    assert batch.cancellation is None


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": ORIGIN, "Sec-Fetch-Site": "same-origin"}, 303),
        ({"Origin": "null"}, 303),  # browsers told to hide the origin send this
        ({"Origin": "null", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "http://evil.example"}, 403),
    ],
)
def test_forms_of_other_sites_are_refused_before_they_are_read(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    client = client_of(app_of(tmp_path))
    batch = new_batch(service_of(client))
    token = token_of(client)
    answer = client.post(f"/batches/{batch.id}/cancel", data={"form_token": token}, headers=headers)
    assert answer.status_code == status
