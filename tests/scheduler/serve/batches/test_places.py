"""Clients see paths below the folder of runs, never above."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swiftbatch.jobs.storage.local_folder import LocalFolder
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.serve.batches.batch_queue import Course
from swiftbatch.scheduler.serve.batches.service import PathRedactor, Service
from tests.scheduler.serve.pages.page_parts import app_of, client_of, in_progress, new_batch, service_of


@pytest.mark.parametrize("uri", ["/srv/the runs", "s3://key:secret@bucket/runs?region=x", "file:///srv/älter"])
def test_places_are_named_below_the_folder_of_runs(uri: str) -> None:
    store = Store(uri)
    places = PathRedactor(store, ["--model", "/opt/models/small", "--note", "/"])
    root = store.shown_uri if not store.is_local else store.uri
    assert places.hidden(f"cannot use run.json in {root}/batches/b: no") == "cannot use run.json in batches/b: no"
    assert places.hidden(f"cannot list {root}: no") == "cannot list the folder of runs: no"
    assert places.hidden(json.dumps({"run": f"{root}/batches/b"})) == '{"run": "batches/b"}'
    assert places.hidden("no model at /opt/models/small: and/or") == "no model at small: and/or"


def damage(service: Service) -> list[str]:
    """Return unreadable batches whose driver named a path, or that have a report."""
    told, torn, whole = new_batch(service), in_progress(service), in_progress(service)
    torn.store.write("run.json", b"{torn")
    service.keeper._courses[told.id] = Course(told, problem=f"cannot read {service.files.uri('file-1')}: gone")
    return [told.id, torn.id, whole.id]


def test_no_answer_says_where_the_server_keeps_things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(app_of(tmp_path))
    ids = damage(service_of(client))
    paths = [f"/v1/batches/{each}{path}" for each in ids for path in ("", "/progress", "/partial", "/report")]
    paths += ["/", *[f"/batches/{each}{path}" for each in ids for path in ("", "/report")], "/v1/batches"]
    answers = [client.get(path) for path in paths]

    def fail(self: LocalFolder, path: str) -> bytes:
        raise OSError(5, "the disk is away")

    monkeypatch.setattr(LocalFolder, "read", fail)
    answers += [client.get(path) for path in paths]
    assert {answer.status_code for answer in answers} == {200, 409, 503}
    assert not [answer.url for answer in answers if str(tmp_path) in answer.text]
    assert "cannot read files/file-1/content: gone" in answers[1].text
    assert f"in batches/{ids[1]}: " in answers[4].text
