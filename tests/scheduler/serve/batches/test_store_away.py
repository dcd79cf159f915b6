from __future__ import annotations

import threading
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from swiftbatch.jobs.storage.store import Store, StoreError
from swiftbatch.scheduler.runs.folder_lock import FolderHeldError
from swiftbatch.scheduler.runs.run_settings import ServeOptions
from swiftbatch.scheduler.serve.batches import batch_supervisor
from swiftbatch.scheduler.serve.batches.batch_driver import DriverOptions
from swiftbatch.scheduler.serve.batches.service import Service
from tests.scheduler.serve.api_parts import client_of, service_on, upload

WAIT_SECONDS = 60


def fail(*_: object) -> None:
    raise StoreError("cannot reach the bucket")


def test_a_store_that_is_away_ends_no_server_but_another_server_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_supervisor, "LEASE_CHECK_SECONDS", 0.0)
    answers: list[Exception] = [StoreError("cannot read serve.json")] * 3 + [FolderHeldError("another one")]
    ends: list[Exception] = []
    has_ended = threading.Event()

    def check_hold() -> None:
        if answers:
            raise answers.pop(0)

    def note(error: Exception) -> None:
        ends.append(error)
        has_ended.set()

    service = Service(Store(str(tmp_path)), ServeOptions(), DriverOptions(), check_hold, note)
    service.start()
    try:
        assert has_ended.wait(WAIT_SECONDS)
    finally:
        service.stop()
    assert [str(end) for end in ends] == ["another one"]
    assert not answers


def test_a_file_that_could_not_be_deleted_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client: TestClient = client_of(service_on(tmp_path))
    file_id = upload(client)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "delete", fail)
        assert client.delete(f"/v1/files/{file_id}").status_code == 503
    assert client.get(f"/v1/files/{file_id}/content").content == b"{}\n"
    assert client.delete(f"/v1/files/{file_id}").json()["deleted"]
    assert client.delete(f"/v1/files/{file_id}").status_code == 404
