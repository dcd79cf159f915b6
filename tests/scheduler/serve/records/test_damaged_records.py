"""A damaged file of one batch hides no other."""

from __future__ import annotations

import errno
import json
from html import unescape
from pathlib import Path

import pytest

from swiftbatch.jobs.run.run import MANIFEST, REJECTS
from swiftbatch.jobs.run.run_records import RunError
from swiftbatch.jobs.storage.local_folder import LocalFolder
from swiftbatch.jobs.storage.store import StoreError
from swiftbatch.scheduler.serve.batches.batch_ending import settle
from swiftbatch.scheduler.serve.records.server_records import BATCH, CANCEL, ENDED, FILE
from swiftbatch.scheduler.serve.records.stored_objects import Batch
from tests.scheduler.driving import wait_until
from tests.scheduler.serve.api_parts import batch_of, client_of, service_on, upload
from tests.scheduler.serve.batch_parts import Folder, submit_two


def put_in_place(path: Path, content: bytes | None) -> None:
    """None makes a folder."""
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)


damaged = pytest.mark.parametrize("content", [b"", None], ids=["an empty file", "a folder"])


@damaged
def test_a_batch_with_a_damaged_record_is_left_out_with_a_line(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(str(tmp_path))
    whole, torn = folder.create(), folder.create()
    put_in_place(tmp_path / "batches" / torn.id / BATCH, content)
    assert [batch.id for batch in folder.again().batches.all()] == [whole.id]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{torn.id} is left out")
    assert BATCH in line


@damaged
def test_a_file_with_a_damaged_record_is_left_out_with_a_line_and_stays(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(str(tmp_path))
    file_id = folder.create().record.input_file_id
    put_in_place(tmp_path / "files" / file_id / FILE, content)
    assert len(folder.again().files) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{file_id} is left out")
    assert (tmp_path / "files" / file_id / "content").exists()


@damaged
@pytest.mark.parametrize("state", ["completed", "cancelled"])
def test_a_damaged_end_is_told_of_and_made_anew_from_the_run(
    state: str, content: bytes | None, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(str(tmp_path / "runs"))
    batch = folder.create()
    submit_two(batch, tiny_model, tmp_path, 1 if state == "cancelled" else 2)
    path = tmp_path / "runs" / "batches" / batch.id
    if state == "cancelled":
        put_in_place(path / CANCEL, content)
        batch = folder.found(batch)
        assert f"{batch.id} was to be cancelled: cannot use {CANCEL}" in capsys.readouterr().err
    assert settle(folder.batches, folder.files, batch, None)
    before = batch.ended
    put_in_place(path / ENDED, content)
    new = folder.again()
    found = new.batches.get(batch.id, None)
    told = capsys.readouterr().err
    assert "the end of a batch is made anew" in told
    assert f"cannot use {ENDED} in {path}" in told
    assert settle(new.batches, new.files, found, None)
    again = folder.found(batch).ended
    assert again.state == before.state == state
    assert (again.counts, again.output_file_id) == (before.counts, before.output_file_id)


def test_a_batch_with_a_damaged_run_answers_beside_the_others(tmp_path: Path) -> None:
    service = service_on(tmp_path)
    client = client_of(service)
    input_file_id = upload(client)
    ids = [client.post("/v1/batches", json=batch_of(input_file_id)).json()["id"] for _ in range(2)]
    damaged = service.batches.get(ids[0], None)
    damaged.store.write(REJECTS, b"")
    damaged.store.write(MANIFEST, b"")
    client = client_of(service_on(tmp_path))
    found = {batch["id"]: batch for batch in client.get("/v1/batches").json()["data"]}
    assert set(found) == set(ids)
    assert found[ids[1]]["errors"] is None
    for method, path in (("GET", ""), ("POST", "/cancel")):
        answer = client.request(method, f"/v1/batches/{ids[0]}{path}")
        assert answer.status_code == 200
        (problem,) = answer.json()["errors"]["data"]
        assert problem["code"] == "damaged_run"
        assert MANIFEST in problem["message"]
    assert MANIFEST in client.get(f"/v1/batches/{ids[0]}/progress").json()["problem"]
    assert client.get(f"/v1/batches/{ids[0]}/partial").json()["data"] == []
    assert client.get(f"/v1/batches/{ids[0]}/report").status_code == 409
    assert client.get(f"/batches/{ids[0]}").status_code == client.get("/").status_code == 200


def damaged_batch(folder: Folder, model: Path, tmp_path: Path) -> Batch:
    batch = folder.create()
    submit_two(batch, model, tmp_path, 1)
    batch.store.write(MANIFEST, b"{torn")
    return batch


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_batch_with_a_damaged_run_fails_without_a_driver_and_delivers_what_is_there(
    is_cancelled: bool, tiny_model: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    batch_id = damaged_batch(Folder(str(runs)), tiny_model, tmp_path).id
    service = service_on(runs)
    client = client_of(service)
    if is_cancelled:
        assert client.post(f"/v1/batches/{batch_id}/cancel").json()["status"] == "cancelling"
    service.start()
    try:
        wait_until(lambda: service.batches.get(batch_id, None).ended)
        wait_until(lambda: not service.keeper.courses())
    finally:
        service.stop()
    found = client.get(f"/v1/batches/{batch_id}").json()
    assert found["status"] == "failed"
    (problem,) = found["errors"]["data"]
    assert problem["message"].startswith(f"batches/{batch_id}/{MANIFEST} is damaged: ")
    assert found["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert '"custom_id":"a"' in client.get(f"/v1/files/{found['output_file_id']}/content").text.replace(" ", "")
    for path in ("", "/progress", "/partial"):
        assert client.get(f"/v1/batches/{batch_id}{path}").status_code == 200
    assert problem["message"] in unescape(client.get(f"/batches/{batch_id}").text)
    assert not (runs / "batches" / batch_id / "logs").exists()  # where a driver writes what it says


def test_a_store_that_is_away_and_a_file_of_a_newer_version_are_no_damage(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(str(tmp_path / "runs"))
    batch = folder.create()
    submit_two(batch, tiny_model, tmp_path, 2)
    manifest = json.loads(batch.store.read(MANIFEST) or b"")
    batch.store.write(MANIFEST, json.dumps(manifest | {"version": 9}).encode())
    with pytest.raises(RunError, match="found version 9"):
        settle(folder.batches, folder.files, batch, None)
    batch.store.write(MANIFEST, json.dumps(manifest).encode())

    def fail(self: LocalFolder, path: str) -> bytes:
        raise OSError(errno.EACCES, "the disk is away")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "read", fail)
        with pytest.raises(StoreError):
            settle(folder.batches, folder.files, batch, None)
    assert batch.ended is None
    assert settle(folder.batches, folder.files, batch, None)
    assert batch.ended.state == "completed"


@pytest.mark.parametrize("content", [b"", b"{}", b"{}\n{}\n"])
def test_a_file_of_another_length_than_it_had_is_refused_before_any_byte(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = client_of(service_on(tmp_path))
    file_id = upload(client)
    (tmp_path / "files" / file_id / "content").write_bytes(content)
    made = client.post("/v1/batches", json=batch_of(file_id))
    for answer in (client.get(f"/v1/files/{file_id}/content"), made):
        assert answer.status_code == 410
        error = answer.json()["error"]
        assert error["code"] == "damaged_file"
        assert f"found {len(content)} bytes, expected 3" in error["message"]
    first, second = capsys.readouterr().err.splitlines()
    assert first == second == f"files/{file_id}/content is damaged: found {len(content)} bytes, expected 3"
    assert client.delete(f"/v1/files/{file_id}").status_code == 200
