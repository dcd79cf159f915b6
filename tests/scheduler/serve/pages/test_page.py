from __future__ import annotations

import re
from html import escape
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.store import Store, StoreError
from swiftbatch.scheduler.serve.batches.batch_ending import end_batch
from swiftbatch.scheduler.serve.pages import page_routes
from swiftbatch.scheduler.serve.records.server_records import BATCH, Counts, Ended, EndState
from tests.metrics.report_parts import ENDED
from tests.metrics.test_report_page import Elements
from tests.scheduler.serve.pages.page_parts import (
    SO_FAR,
    app_of,
    client_of,
    in_progress,
    new_batch,
    service_of,
    token_of,
    words_of,
)


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return client_of(app_of(tmp_path))


def test_an_empty_list_says_so_below_its_headings(client: TestClient) -> None:
    page = client.get("/").text
    assert "<th>batch</th>" in page
    assert "<th></th>" not in page, "a heading without words tells a screen reader nothing"
    assert "There is no batch yet: upload a file of jobs." in words_of(page)


def test_the_list_has_the_figures_of_each_batch(client: TestClient) -> None:
    service = service_of(client)
    going = in_progress(service)
    new_batch(service, "queued.jsonl")
    state: EndState
    for state in ("completed", "failed", "expired", "cancelled"):
        counts = Counts(total=3, completed=2, failed=1)
        ended = Ended(
            state=state, counts=counts, in_progress=10.0, finalizing=20.0, ended=21.0, num_generated_tokens=90
        )
        service.batches.end(new_batch(service, f"{state}.jsonl"), ended)
    page = client.get("/").text
    found = Elements(page)
    rows = re.findall(r"<tr id=.*?</tr>", page, re.S)
    shown = [words_of(row) for row in rows]
    assert [row.split()[0] for row in shown] == [
        *("cancelled.jsonl", "expired.jsonl", "failed.jsonl", "completed.jsonl", "queued.jsonl", "Letters")
    ]
    assert all(state in row for state, row in zip(("cancelled", "expired", "failed", "completed"), shown, strict=False))
    assert "3 of 3 lines" in shown[0]
    assert "90 tokens 9.0" in shown[0]
    assert "validating lines yet to be read" in shown[4]
    for figure in (
        "in progress",
        "3 of 5 lines",
        "1,400 of at most 3,000 tokens",
        "12.5",
        "0:02:08",
        "s ago",
        "Cancel",
    ):
        assert figure in shown[5]
    assert ["/cancel" in row for row in rows] == [False] * 4 + [True] * 2
    bars = [bar for tag, bar in found.elements if tag == "progress"]
    assert all(bar["aria-label"] for bar in bars)
    assert (bars[-1]["value"], bars[-1]["max"], bars[-1]["aria-label"]) == ("1400", "3000", f"Tokens of {going.id}")
    labelled = {label["for"] for tag, label in found.elements if tag == "label"}
    assert labelled == {
        field["id"] for tag, field in found.elements if tag in ("input", "select", "textarea") and "id" in field
    }


def test_a_batch_has_its_figures_jobs_and_problems(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_routes, "NUM_JOBS", 3)
    batch = in_progress(service_of(client))
    page = client.get(f"/batches/{batch.id}").text
    words = words_of(page)
    for figure in (
        "in progress",
        "3 of 5 lines",
        "completed 1",
        "failed 2",
        "tokens/s 12.5",
        "time left, at most 0:02:08",
    ):
        assert figure in words
    assert "done finished 1,000 length going running 400 lost failed" in words
    assert "line job reason lost its worker died 9 torn not JSON" in words
    assert "Running now The end of each text, as of its newest checkpoint." in words
    assert re.search(r"going \d+ tokens", words)
    assert f"<bdi>{escape(SO_FAR)}" in page
    assert "page 1 of 2, 4 jobs Later" in words
    assert "waiting" not in words
    assert "waiting pending" in words_of(client.get(f"/batches/{batch.id}?jobs=2").text)
    assert "waiting pending" in words_of(client.get(f"/batches/{batch.id}?jobs=99").text)
    assert client.get(f"/batches/{batch.id}?jobs=0").status_code == 400


def test_an_ended_batch_leads_to_its_files_and_its_report(client: TestClient) -> None:
    service = service_of(client)
    batch = in_progress(service)
    Run.open(batch.store.uri).write_progress(ENDED)
    service.batches.request_cancel(batch)
    end_batch(service.batches, service.files, batch, "cancelled", None)
    page = client.get(f"/batches/{batch.id}").text
    for name, text in (("output", '"done"'), ("errors", '"torn"')):
        assert f'href="/batches/{batch.id}/{name}.jsonl"' in page
        answer = client.get(f"/batches/{batch.id}/{name}.jsonl")
        assert text in answer.text
        assert answer.headers["Content-Disposition"] == f'attachment; filename="{batch.id}_{name}.jsonl"'
        assert answer.headers["Content-Type"] == "application/octet-stream"
    assert "waiting cancelled" in words_of(page)
    assert "1,000 tokens" in words_of(page)
    assert "data-refresh" not in page
    assert "/cancel" not in page
    assert "<html" in client.get(f"/batches/{batch.id}/report").text


def test_a_batch_with_a_price_says_what_it_and_each_job_cost(client: TestClient) -> None:
    service = service_of(client)
    batch = in_progress(service)
    assert "cost" not in client.get(f"/batches/{batch.id}").text
    run = Run.open(batch.store.uri)
    progress = run.progress()
    priced = {"worker_seconds": 7200.0, "price_per_worker_hour": 0.35, "num_generated_tokens": 1400}
    run.write_progress(progress.model_copy(update=priced))
    service._watchers.clear()  # which look once in a second
    words = words_of(client.get(f"/batches/{batch.id}").text)
    assert "cost so far 0.7" in words
    assert "job state tokens cost finish reason done finished 1,000 0.5 length going running 400 0.2 lost" in words
    run.write_progress(ENDED.model_copy(update=priced))
    service.batches.request_cancel(batch)
    end_batch(service.batches, service.files, batch, "cancelled", None)
    words = words_of(client.get(f"/batches/{batch.id}").text)
    assert "cost 0.7" in words
    assert "done finished 1,000 0.5 length" in words


def test_lists_are_had_page_by_page(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_routes, "NUM_BATCHES", 2)
    service = service_of(client)
    ids = [new_batch(service).id for _ in range(3)]
    first = client.get("/").text
    assert re.findall(r'<tr id="(\w+)"', first) == ids[:0:-1]
    [older] = re.findall(r'href="(/\?after=\w+)"', first)
    second = client.get(older).text
    assert re.findall(r'<tr id="(\w+)"', second) == ids[:1]
    assert ">Older<" not in second


def test_a_file_becomes_a_batch_without_a_script(client: TestClient) -> None:
    said = {"endpoint": "/v1/completions", "window": " 2h ", "metadata": "name: Letters\r\nfor: you: all\r\n\r\n"}
    file = {"file": ("../my jobs.jsonl", b"{}\n")}
    answer = client.post("/", data=said | {"form_token": token_of(client)}, files=file)
    assert answer.status_code == 303
    [batch] = service_of(client).batches.all()
    assert answer.headers["Location"] == f"/batches/{batch.id}"
    record = batch.record
    assert (record.completion_window, record.metadata) == ("2h", {"name": "Letters", "for": "you: all"})
    kept = service_of(client).files.get(record.input_file_id, None)
    assert (kept.filename, kept.num_bytes) == ("../my jobs.jsonl", 3)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"window": "soon"}, "completion_window"),
        ({"priority": "soon"}, "priority"),
        ({"webhook": "https://hooks.example.com/x"}, "webhook"),
        ({"endpoint": "/v1/other"}, "endpoint"),
        ({"metadata": "no colon"}, "expected a name, a colon and a value"),
        ({"metadata": f"{'x' * 65}: y"}, "metadata"),
        ({"file": None}, "no file was chosen"),
    ],
)
def test_what_is_refused_is_told_beside_the_form_and_leaves_nothing(
    client: TestClient, changed: dict[str, str], problem: str
) -> None:
    said = {"endpoint": "/v1/completions", "window": "2h", "metadata": "a: b", "form_token": token_of(client)} | changed
    file = said.pop("file", "jobs.jsonl")
    answer = client.post("/", data=said, files={"file": (file, b"{}\n")} if file else {"none": ("", b"")})
    assert answer.status_code == 400
    assert problem in words_of(answer.text)
    assert said["metadata"] in Elements(answer.text).text
    assert len(service_of(client).files) == len(service_of(client).batches) == 0


def test_a_form_whose_batch_cannot_be_kept_leaves_no_file(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Store.write

    def write_no_batch(store: Store, path: str, data: bytes) -> None:
        if path == BATCH:
            raise StoreError("cannot reach the bucket")
        write(store, path, data)

    monkeypatch.setattr(Store, "write", write_no_batch)
    said = {"endpoint": "/v1/completions", "window": "2h", "form_token": token_of(client)}
    answer = client.post("/", data=said, files={"file": ("jobs", b"{}\n")})
    assert (answer.status_code, "cannot reach the bucket" in words_of(answer.text)) == (503, True)
    assert len(service_of(client).files) == len(service_of(client).batches) == 0


def test_a_form_gives_a_priority_and_an_address_for_the_end_where_those_are_taken(tmp_path: Path) -> None:
    client = client_of(app_of(tmp_path, webhook_hosts="hooks.example.com"))
    page = client.get("/").text
    assert all(f'name="{name}"' in page for name in ("priority", "webhook"))
    said = {"endpoint": "/v1/completions", "window": "2h", "priority": " -3 ", "webhook": "https://hooks.example.com/x"}
    made = client.post("/", data=said | {"form_token": token_of(client)}, files={"file": ("jobs", b"{}\n")})
    assert made.status_code == 303
    [batch] = service_of(client).batches.all()
    assert (batch.record.priority, batch.record.webhook) == (-3, "https://hooks.example.com/x")
    assert 'name="webhook"' not in client_of(app_of(tmp_path / "others")).get("/").text


def test_a_batch_is_cancelled_by_a_form(client: TestClient) -> None:
    batch = new_batch(service_of(client))
    answer = client.post(f"/batches/{batch.id}/cancel", data={"form_token": token_of(client)})
    assert (answer.status_code, answer.headers["Location"]) == (303, f"/batches/{batch.id}")
    assert batch.cancellation is not None
    assert "cancelling" in words_of(client.get("/").text)
    cancelled = client.post("/batches/batch_none/cancel", data={"form_token": token_of(client)})
    assert cancelled.status_code == 404


def test_a_batch_whose_folder_is_damaged_stops_no_page(client: TestClient) -> None:
    batch = in_progress(service_of(client))
    batch.store.write("run.json", b"{torn")
    for path in ("/", f"/batches/{batch.id}"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert "cannot use run.json" in words_of(answer.text)
