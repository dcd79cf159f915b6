"""A damaged file of one batch is told of, and hides no other batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.run.run import MANIFEST, REJECTS
from scheduler.serve.records import BATCH, CANCEL, ENDED, FILE
from tests.scheduler.serve.api_parts import batch_of, client_of, service_on, upload
from tests.scheduler.serve.batch_parts import Folder


@pytest.mark.parametrize("name", [BATCH, CANCEL, ENDED])
def test_a_batch_with_a_damaged_record_is_left_out_with_a_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(str(tmp_path))
    whole, damaged = folder.create(), folder.create()
    damaged.store.write(name, b"")
    assert [batch.id for batch in folder.again().batches.all()] == [whole.id]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{damaged.id} is left out")
    assert name in line


def test_a_file_with_a_damaged_record_is_left_out_with_a_line_and_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(str(tmp_path))
    file_id = folder.create().record.input_file_id
    (tmp_path / "files" / file_id / FILE).write_bytes(b"")
    assert len(folder.again().files) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{file_id} is left out")
    assert (tmp_path / "files" / file_id / "content").exists()


def test_a_batch_with_a_damaged_run_is_listed_with_the_problem_beside_the_others(tmp_path: Path) -> None:
    service = service_on(tmp_path)
    client = client_of(service)
    input_file_id = upload(client)
    ids = [client.post("/v1/batches", json=batch_of(input_file_id)).json()["id"] for _ in range(2)]
    damaged = service.batches.get(ids[0], None)
    damaged.store.write(REJECTS, b"")
    damaged.store.write(MANIFEST, b"")
    service = service_on(tmp_path)
    listed = client_of(service).get("/v1/batches").json()["data"]
    found = {batch["id"]: batch for batch in listed}
    assert set(found) == set(ids)
    assert found[ids[1]]["errors"] is None
    (problem,) = found[ids[0]]["errors"]["data"]
    assert problem["code"] == "damaged_run"
    assert MANIFEST in problem["message"]
