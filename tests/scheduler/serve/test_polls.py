"""Polls from memory equal the routes' answers, and read folders rarely."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from swiftbatch.scheduler.serve import server
from swiftbatch.scheduler.serve.batches.service import Service
from swiftbatch.scheduler.serve.records.api_keys import make_key
from swiftbatch.scheduler.serve.records.batch_status import Watcher
from swiftbatch.scheduler.serve.records.server_records import Counts, Ended
from swiftbatch.scheduler.serve.records.stored_objects import Batch
from swiftbatch.scheduler.serve.routes import batch_routes
from tests.scheduler.serve.api_parts import batch_of, bearer, client_of, service_on, upload
from tests.scheduler.serve.batch_parts import submit_two

ALICE, ALICE_LINE = make_key("alice")
BOB, BOB_LINE = make_key("bob")


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return service_on(tmp_path / "runs")


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    with client_of(service) as client:
        yield client


@pytest.fixture
def batch(service: Service, client: TestClient, tiny_model: Path, tmp_path: Path) -> Batch:
    batch_id = client.post("/v1/batches", json=batch_of(upload(client))).json()["id"]
    batch = service.batches.get(batch_id, None)
    submit_two(batch, tiny_model, tmp_path, 1)
    return batch


@pytest.fixture
def stopped_clock(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stops the clock, so that nothing remembered expires."""
    now = [time.monotonic() + 3600]
    monkeypatch.setattr("swiftbatch.scheduler.serve.records.batch_status.time.monotonic", lambda: now[0])
    return now


def polls_of(client: TestClient, batch: Batch) -> list[object]:
    path = f"/v1/batches/{batch.id}"
    listed = {each["id"]: each["status"] for each in client.get("/v1/batches").json()["data"]}
    return [client.get(path).json()["status"], client.get(f"{path}/progress").json()["status"], listed[batch.id]]


def end(service: Service, batch: Batch) -> None:
    now = time.time()
    ended = Ended(state="completed", counts=Counts(total=3, completed=3), in_progress=now, finalizing=now, ended=now)
    service.batches.end(batch, ended)


def test_the_next_poll_shows_a_cancellation_an_end_and_a_new_batch(
    service: Service, client: TestClient, batch: Batch, stopped_clock: list[float]
) -> None:
    assert polls_of(client, batch) == ["in_progress"] * 3
    assert polls_of(client, batch) == ["in_progress"] * 3
    client.post(f"/v1/batches/{batch.id}/cancel")
    assert polls_of(client, batch) == ["cancelling"] * 3
    assert client.get(f"/v1/batches/{batch.id}").json()["cancelling_at"] is not None
    end(service, batch)
    assert polls_of(client, batch) == ["completed"] * 3
    new = client.post("/v1/batches", json=batch_of(upload(client))).json()["id"]
    assert [each["id"] for each in client.get("/v1/batches").json()["data"]] == [new, batch.id]


def test_the_folder_is_read_once_in_a_heartbeat_and_what_it_says_then_is_told(
    client: TestClient, batch: Batch, stopped_clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    look = Watcher._look
    monkeypatch.setattr(Watcher, "_look", lambda watcher: [looks.append(stopped_clock[0]), look(watcher)][1])
    for seconds in (0.0, 1.0, 1.0):
        stopped_clock[0] += seconds
        for _ in range(5):
            polls_of(client, batch)
    assert len(looks) == len(set(looks)) == 3


def test_an_object_store_is_read_as_seldom_as_a_heartbeat_comes_there(
    batch: Batch, stopped_clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftbatch.scheduler.serve.records.batch_status.beat_seconds", lambda store: 5.0)
    watcher = Watcher(batch)
    first = watcher.status()
    stopped_clock[0] += 4.9
    assert watcher.remembered() is watcher.status() is first
    stopped_clock[0] += 0.1
    assert watcher.remembered() is None


def test_routes_and_polls_answer_alike(
    service: Service, client: TestClient, batch: Batch, stopped_clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = ["/v1/batches", *[f"/v1/batches/{batch.id}{rest}" for rest in ("", "/progress", "/partial", "/other")]]
    paths += ["/v1/batches?limit=1", "/v1/batches/batch_none", f"/v1/batches/{batch.id}/"]
    client.get(paths[1])
    polled = [client.get(path) for path in paths]
    monkeypatch.setattr(server.Polls, "_found", lambda *arguments: None)
    for path, answer in zip(paths, polled, strict=True):
        routed = client.get(path)
        assert (routed.status_code, routed.content) == (answer.status_code, answer.content), path
        assert routed.headers == answer.headers, path


def test_what_is_remembered_of_one_key_is_told_to_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{ALICE_LINE}\n{BOB_LINE}\n")
    client = client_of(service_on(tmp_path / "runs", api_keys=str(keys)))
    alice, bob = bearer(ALICE), bearer(BOB)
    batch_id = client.post("/v1/batches", json=batch_of(upload(client, alice)), headers=alice).json()["id"]
    for rest in ("", "/progress"):
        path = f"/v1/batches/{batch_id}{rest}"
        assert client.get(path, headers=alice).json()["id"] == batch_id
        assert client.get(path, headers=bob).status_code == 404
        assert client.get(path).status_code == client.get(path, headers=bearer("sb_other")).status_code == 401
    assert client.get("/v1/batches", headers=bob).json()["data"] == []
    assert len(client.get("/v1/batches", headers=alice).json()["data"]) == 1


def test_a_poll_takes_no_thread_and_no_route(
    client: TestClient, batch: Batch, stopped_clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    polls_of(client, batch)
    for module, name in ((batch_routes, "batch_object"), (batch_routes, "progress_object")):
        monkeypatch.setattr(module, name, None)
    assert polls_of(client, batch) == ["in_progress"] * 3


def test_polls_are_counted_with_all_requests(service: Service, client: TestClient, batch: Batch) -> None:
    before = service.counters.num_requests["2xx"]
    polls_of(client, batch)
    assert service.counters.num_requests["2xx"] == before + 3
