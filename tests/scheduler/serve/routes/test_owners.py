"""A key sees only its own files and batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from swiftbatch.scheduler.serve.records.api_keys import make_key
from swiftbatch.scheduler.serve.records.server_records import new_batch_id, new_file_id
from tests.scheduler.serve.api_parts import batch_of, bearer, client_of, service_on, upload

ALICE, ALICE_LINE = make_key("alice")
BOB, BOB_LINE = make_key("bob")
BOTH = (bearer(ALICE), bearer(BOB))


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    keys = tmp_path / "keys"
    keys.write_text(f"{ALICE_LINE}\n{BOB_LINE} max_unfinished=1\n")
    return client_of(service_on(tmp_path / "runs", api_keys=str(keys)))


def requests_for(file_id: str, batch_id: str) -> list[tuple[str, str, object]]:
    of_files = [("GET", ""), ("GET", "/content"), ("DELETE", "")]
    of_batches = [("GET", ""), ("POST", "/cancel"), *[("GET", f"/{what}") for what in WATCHED]]
    return [
        *[(method, f"/v1/files/{file_id}{path}", None) for method, path in of_files],
        *[(method, f"/v1/batches/{batch_id}{path}", None) for method, path in of_batches],
        ("POST", "/v1/batches", batch_of(file_id)),
        ("GET", f"/v1/files?after={file_id}", None),
        ("GET", f"/v1/batches?after={batch_id}", None),
    ]


WATCHED = ("progress", "partial", "report", "events")


def test_ids_of_others_answer_as_ids_that_never_were(client: TestClient) -> None:
    alice, bob = BOTH
    file_id = upload(client, alice)
    batch_id = client.post("/v1/batches", json=batch_of(file_id), headers=alice).json()["id"]
    never = (new_file_id(), new_batch_id())

    def answers(ids: tuple[str, str], headers: dict[str, str]) -> list[tuple[int, str]]:
        found = []
        for method, path, body in requests_for(*ids):
            answer = client.request(method, path, json=body, headers=headers)
            assert answer.status_code != 200, path
            found.append((answer.status_code, answer.text.replace(ids[0], "FILE").replace(ids[1], "BATCH")))
        return found

    of_others = answers((file_id, batch_id), bob)
    assert of_others == answers(never, bob)
    assert {status for status, _ in of_others} == {400, 404}
    assert client.get(f"/v1/files/{file_id}", headers=alice).json()["id"] == file_id
    assert client.get(f"/v1/batches/{batch_id}", headers=alice).json()["status"] == "validating"


def test_lists_hold_what_is_ones_own(client: TestClient) -> None:
    alice, bob = BOTH
    ids = {name: [upload(client, headers) for _ in range(3)] for name, headers in (("alice", alice), ("bob", bob))}
    for headers, name in ((alice, "alice"), (bob, "bob")):
        made = client.post("/v1/batches", json=batch_of(ids[name][0]), headers=headers).json()["id"]
        files = client.get("/v1/files?order=asc", headers=headers).json()
        assert [file["id"] for file in files["data"]] == ids[name]
        assert not files["has_more"]
        assert [batch["id"] for batch in client.get("/v1/batches", headers=headers).json()["data"]] == [made]


def test_a_key_has_so_many_unfinished_batches_and_no_more(client: TestClient) -> None:
    alice, bob = BOTH
    for headers, status in ((bob, 429), (alice, 200)):
        file_id = upload(client, headers)
        assert client.post("/v1/batches", json=batch_of(file_id), headers=headers).status_code == 200
        answer = client.post("/v1/batches", json=batch_of(file_id), headers=headers)
        assert answer.status_code == status
    refused = client.post("/v1/batches", json=batch_of(upload(client, bob)), headers=bob)
    assert "expected at most 1 unfinished batch" in refused.json()["error"]["message"]
    assert refused.headers["Retry-After"]
