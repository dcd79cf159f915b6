from __future__ import annotations

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from swiftbatch.scheduler.serve.records.api_keys import Keyring, make_key
from swiftbatch.scheduler.serve.routes.access_control import AccessControl, Sessions
from tests.scheduler.serve.api_parts import bearer

SECRET, LINE = make_key("alice")
SCRAPER, SCRAPER_LINE = make_key("prometheus")


def client_of(keyring: Keyring | None, only_loopback: bool) -> TestClient:
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    def owner(request: Request) -> dict[str, str | None]:
        return {"owner": request.state.owner}

    app.add_middleware(AccessControl, keyring=keyring, sessions=Sessions(), only_loopback=only_loopback)
    return TestClient(app, base_url="http://127.0.0.1:8080")


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"{LINE}\n{SCRAPER_LINE} metrics=yes\n")
    return client_of(Keyring(str(path), print), False)


def test_a_key_says_whose_a_request_is(keyed: TestClient) -> None:
    assert keyed.get("/v1/files", headers=bearer(SECRET)).json() == {"owner": "alice"}
    assert keyed.get("/v1/files", headers={"Authorization": f"bearer  {SECRET} "}).json() == {"owner": "alice"}
    assert keyed.get("/healthz").status_code == keyed.get("/readyz").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("none"),
        bearer(SECRET[:-1]),
        bearer(SECRET + "x"),
        bearer(LINE.rpartition(":")[2]),
        {"Authorization": SECRET},
        {"Authorization": f"Basic {SECRET}"},
        {"Authorization": b"Bearer \xff\xfe"},
        {"X-Api-Key": SECRET},
    ],
)
@pytest.mark.parametrize("path", ["/v1/files", "/metrics", "/sd", "/nowhere", "/healthz/", "/%2e%2e/healthz"])
def test_all_else_is_refused_before_it_is_looked_at(keyed: TestClient, headers: dict[str, str], path: str) -> None:
    answer = keyed.post(path, headers=headers, content=b"{" * 100_000)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert SECRET not in answer.text


@pytest.mark.parametrize("path", ["/metrics", "/sd"])
def test_what_tells_of_everybody_is_for_keys_that_say_so(keyed: TestClient, path: str) -> None:
    assert keyed.get(path, headers=bearer(SECRET)).status_code == 403
    assert keyed.get(path, headers=bearer(SCRAPER)).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 200),
        ("127.0.0.1", 200),
        ("127.1.2.3:1", 200),
        ("[::1]:8080", 200),
        ("evil.example", 403),
        ("localhost.evil.example:8080", 403),
        ("evil.example:8080@127.0.0.1", 200),  # browsers never send a user part
        ("10.0.0.1", 403),
        ("[::", 403),
        ("", 403),
    ],
)
def test_without_keys_pages_behind_other_names_reach_nothing(host: str, status: int) -> None:
    for path in ("/v1/files", "/healthz"):
        assert client_of(None, True).get(path, headers={"Host": host}).status_code == status
    assert client_of(None, False).get("/v1/files", headers={"Host": host}).json() == {"owner": None}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://127.0.0.1:8080"}, 200),
        ({"Origin": "http://127.0.0.1:8080", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "https://other.example", "Sec-Fetch-Site": "none"}, 200),
        ({"Origin": "http://127.0.0.1:9090"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_pages_of_other_sites_change_nothing(headers: dict[str, str], status: int, keyed: TestClient) -> None:
    for client in (client_of(None, True), client_of(None, False), keyed):
        assert client.post("/v1/files", headers=headers | bearer(SECRET)).status_code == status
        assert client.delete("/v1/files", headers=headers | bearer(SECRET)).status_code == status
        assert client.get("/v1/files", headers=headers | bearer(SECRET)).status_code == 200
