from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from swiftbatch.jobs.storage.store import Store, StoreError
from swiftbatch.scheduler.serve.records.api_keys import make_key
from tests.scheduler.serve.api_parts import batch_of, bearer, client_of, service_on, upload

KEY = {"Idempotency-Key": "night-17"}


def create(client: TestClient, file_id: str, headers: dict[str, str] = KEY, **fields: object) -> Any:
    return client.post("/v1/batches", json=batch_of(file_id, **fields), headers=headers)


def ids(client: TestClient, place: str = "batches") -> list[str]:
    return [each["id"] for each in client.get(f"/v1/{place}").json()["data"]]


def test_the_same_request_again_returns_the_first_batch_also_after_a_restart(tmp_path: Path) -> None:
    client = client_of(service_on(tmp_path))
    file_id = upload(client)
    first = create(client, file_id, metadata={"for": "a test"}).json()
    assert create(client, file_id, metadata={"for": "a test"}).json() == first
    assert create(client, file_id, {}).json()["id"] != create(client, file_id, {}).json()["id"]
    again = client_of(service_on(tmp_path))  # on a killed server's leftovers
    assert create(again, file_id, metadata={"for": "a test"}).json() == first
    assert (
        create(again, file_id, {"Idempotency-Key": "night-18"}, metadata={"for": "a test"}).json()["id"] != first["id"]
    )
    assert len(ids(again)) == 4


def test_of_many_requests_at_once_one_makes_the_batch(tmp_path: Path) -> None:
    service = service_on(tmp_path)
    client = client_of(service)
    file_id = upload(client)
    with ThreadPoolExecutor(8) as pool:
        made = {answer.json()["id"] for answer in pool.map(lambda _: create(client, file_id), range(8))}
    assert len(made) == len(ids(client)) == len(service.keeper.courses()) == 1


def test_another_request_with_the_key_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    client = client_of(service_on(tmp_path))
    file_id, other_id = upload(client), upload(client)
    create(client, file_id)
    changed: list[dict[str, object]] = [{"metadata": {"a": "b"}}, {"completion_window": "25h"}, {"priority": 1}]
    for refused in (create(client, other_id), *(create(client, file_id, **fields) for fields in changed)):
        assert refused.status_code == 422
        assert refused.json()["error"]["code"] == "idempotency_key_reused"
        assert "'night-17' came with another request before" in refused.json()["error"]["message"]
    assert len(ids(client)) == 1


def test_a_batch_counts_though_its_file_is_gone_and_no_further_one_is_allowed(tmp_path: Path) -> None:
    secret, line = make_key("team")
    (tmp_path / "keys").write_text(f"{line} max_unfinished=1\n")
    service = service_on(tmp_path / "runs", api_keys=str(tmp_path / "keys"))
    client, headers = client_of(service), bearer(secret)
    file_id = upload(client, headers)
    first = create(client, file_id, headers | KEY)
    assert create(client, file_id, headers | KEY).json() == first.json()
    assert create(client, file_id, headers).status_code == 429
    (tmp_path / "runs" / "files" / file_id / "content").unlink()
    assert create(client, file_id, headers | KEY).json() == first.json()


def test_a_batch_is_one_though_the_store_failed_behind_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = service_on(tmp_path)
    client = client_of(service)
    file_id = upload(client)

    def write(self: Store, path: str, data: bytes) -> None:
        wrote(self, path, data)
        raise StoreError("the answer was lost")

    wrote = Store.write
    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", write)
        assert create(client, file_id).status_code == 503
    made = create(client, file_id)
    assert ids(client) == [made.json()["id"]]
    assert len(service.keeper.courses()) == 1
    record = next(tmp_path.glob("batches/*/batch.json"))
    record.write_bytes(b"{")
    assert create(client_of(service_on(tmp_path)), file_id).status_code == 409


def test_a_file_that_comes_twice_is_kept_once(tmp_path: Path) -> None:
    client = client_of(service_on(tmp_path))
    first = upload(client, KEY, b"{}\n")
    assert upload(client, KEY, b"{}\n") == first
    for data in (b"{}", b"{}\n\n", b"{]\n"):
        answer = client.post("/v1/files", files={"file": ("x.jsonl", data)}, data={"purpose": "batch"}, headers=KEY)
        assert answer.status_code == 422
    assert ids(client, "files") == [first]
    assert client.get(f"/v1/files/{first}/content").content == b"{}\n"


@pytest.mark.parametrize("key", ["", "k" * 256])
def test_a_key_that_is_none_is_refused(tmp_path: Path, key: str) -> None:
    client = client_of(service_on(tmp_path))
    refused = create(client, upload(client), {"Idempotency-Key": key})
    assert refused.status_code == 400
    assert f"found {len(key)} characters, expected 1 to 255" in refused.json()["error"]["message"]
