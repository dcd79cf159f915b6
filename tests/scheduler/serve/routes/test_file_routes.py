from __future__ import annotations

import io
from typing import Any

import pytest
from fastapi.testclient import TestClient

from swiftbatch.scheduler.serve.batches.service import Service
from swiftbatch.scheduler.serve.records.server_records import delivered_file_id
from tests.scheduler.serve.api_parts import batch_of, client_of, service_on, upload

DATA = bytes(range(200)) * 3
SIZE = len(DATA)
DAY = {"anchor": "created_at", "seconds": 86400}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return service_on(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="module")
def client(service: Service) -> TestClient:
    return client_of(service)


@pytest.fixture(scope="module")
def place(client: TestClient) -> str:
    return f"/v1/files/{upload(client, data=DATA)}/content"


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ("bytes=0-", DATA),
        ("bytes=0-0", DATA[:1]),
        ("bytes=100-299", DATA[100:300]),
        ("bytes=599-", DATA[-1:]),
        ("bytes=590-100000", DATA[590:]),
        ("bytes=-7", DATA[-7:]),
        ("bytes=-100000", DATA),
    ],
)
def test_a_part_of_a_file_is_sent_alone(client: TestClient, place: str, said: str, part: bytes) -> None:
    answer = client.get(place, headers={"Range": said})
    assert (answer.status_code, answer.content) == (206, part)
    start = SIZE - len(part) if said.startswith("bytes=-") else int(said[6:].split("-")[0])
    assert answer.headers["content-range"] == f"bytes {start}-{start + len(part) - 1}/{SIZE}"
    assert answer.headers["content-length"] == str(len(part))


@pytest.mark.parametrize(
    "said", ["", "bytes", "bytes=-", "bytes=7-5", "lines=0-5", "bytes=0-1,5-6", "bytes=x-", "bytes=-x"]
)
def test_what_is_no_single_part_is_answered_with_all(client: TestClient, place: str, said: str) -> None:
    answer = client.get(place, headers={"Range": said})
    assert (answer.status_code, answer.content) == (200, DATA)
    assert answer.headers["accept-ranges"] == "bytes"


@pytest.mark.parametrize("said", [f"bytes={SIZE}-", "bytes=-0", f"bytes={'9' * 18}-"])
def test_a_part_beyond_the_end_is_refused_with_the_size(client: TestClient, place: str, said: str) -> None:
    answer = client.get(place, headers={"Range": said})
    assert (answer.status_code, answer.headers["content-range"]) == (416, f"bytes */{SIZE}")


def test_a_head_tells_the_size_and_the_version(client: TestClient, place: str) -> None:
    head, whole = client.head(place), client.get(place)
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(SIZE))
    assert head.headers["etag"] == whole.headers["etag"]


def test_a_download_that_goes_on_never_mixes_two_versions(service: Service, client: TestClient) -> None:
    """A batch's end is made anew with the same file id, as after a repair."""
    file_id = delivered_file_id("batch_a", "output")
    service.files.add(io.BytesIO(DATA), "x", "batch_output", None, file_id)
    place = f"/v1/files/{file_id}/content"
    tag = client.get(place).headers["etag"]
    going_on = {"Range": "bytes=300-", "If-Range": tag}
    assert client.get(place, headers=going_on).content == DATA[300:]
    service.files.add(io.BytesIO(DATA[::-1]), "x", "batch_output", None, file_id)
    answer = client.get(place, headers=going_on)
    assert (answer.status_code, answer.content) == (200, DATA[::-1])


def test_a_download_of_the_page_goes_on_too(service: Service, client: TestClient) -> None:
    batch_id = client.post("/v1/batches", json=batch_of(upload(client))).json()["id"]
    service.files.add(io.BytesIO(DATA), "x", "batch_output", None, delivered_file_id(batch_id, "output"))
    place = f"/batches/{batch_id}/output.jsonl"
    answer, head = client.get(place, headers={"Range": "bytes=5-"}), client.head(place)
    assert (answer.status_code, answer.content) == (206, DATA[5:])
    assert (head.status_code, head.headers["content-length"]) == (200, str(SIZE))
    assert head.headers["content-disposition"] == f'attachment; filename="{batch_id}_output.jsonl"'


def test_times_after_which_files_would_go_are_taken_by_both_and_the_objects_say_that_they_stay(
    client: TestClient,
) -> None:
    from openai import BadRequestError, OpenAI

    openai = OpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=client, max_retries=0)
    after: Any = DAY
    file = openai.files.create(file=("x.jsonl", b"{}\n"), purpose="batch", expires_after=after)
    assert file.expires_at is None
    batch: Any = batch_of(file.id, output_expires_after=after)
    assert openai.batches.create(**batch).input_file_id == file.id
    for wrong in (DAY | {"seconds": 5}, DAY | {"anchor": "never"}, {"anchor": "created_at"}, DAY | {"x": 1}):
        with pytest.raises(BadRequestError, match="expires_after"):
            openai.files.create(file=("x.jsonl", b"{}\n"), purpose="batch", expires_after=wrong)
        with pytest.raises(BadRequestError, match="output_expires_after"):
            openai.batches.create(**batch | {"output_expires_after": wrong})


def test_an_unknown_field_of_an_upload_is_refused(client: TestClient) -> None:
    answer = client.post("/v1/files", files={"file": b"x"}, data={"purpose": "batch", "expire_after": "1"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        'unknown field "expire_after", expected one of: file, purpose, expires_after'
    )


@pytest.mark.parametrize("fields", [{"priority": 3.0}, {"priority": None, "webhook": None, "metadata": None}])
def test_a_batch_is_asked_for_as_lines_are_written(client: TestClient, fields: dict[str, Any]) -> None:
    endpoint = "https://api.openai.com/v1/completions/"
    answer = client.post("/v1/batches", json=batch_of(upload(client), **fields) | {"endpoint": endpoint})
    assert answer.status_code == 200, answer.text
    assert (answer.json()["endpoint"], answer.json()["priority"]) == ("/v1/completions", fields["priority"] or 0)
