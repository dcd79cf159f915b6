"""The real `openai` client against a real server, whose drivers take seconds to start."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.driving import wait_until
from tests.scheduler.serve.server_parts import (
    OFTEN,
    Server,
    bodies,
    drivers_of,
    is_there,
    request,
    serving,
    until_half_done,
)

pytestmark = pytest.mark.ray

CHAT = {
    "custom_id": "c",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "jumps over"}], "max_tokens": 5},
}
MAX_FILE_BYTES = 100_000
NUM_TOKENS = 2500
# with log-probabilities, eight plain steps at once can't end before a kill
LONG = (request("short", 5), request("drawn", NUM_TOKENS, min_p=0.02, logprobs=1))


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    runs = tmp_path_factory.mktemp("served")
    with serving(
        runs, tiny_model, "--max-file-bytes", str(MAX_FILE_BYTES), "--slots", "2", "--metrics-port", "0"
    ) as server:
        yield server


def get(server: Server, path: str) -> Any:
    with urllib.request.urlopen(f"{server.url}{path}", timeout=60) as response:
        data = response.read()
        return json.loads(data) if response.headers["Content-Type"] == "application/json" else data.decode()


def test_a_batch_from_upload_to_its_two_files_also_over_a_killed_server(
    server: Server, tiny_model: Path, tmp_path: Path
) -> None:
    import openai

    client = server.client
    lines = [*LONG, request("b", n=2), "{torn", CHAT]
    file = client.files.retrieve(server.upload(*lines, name="../../evil\n.jsonl"))
    assert (file.object, file.purpose, file.status, file.bytes > 0) == ("file", "batch", "processed", True)
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"for": "a test"}
    )
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"for": "a test"})
    assert batch.expires_at == pytest.approx(batch.created_at + 86400, abs=1)
    with pytest.raises(openai.ConflictError, match="is the input of batch_"):
        client.files.delete(file.id)
    ended = server.ended(batch.id)
    assert (ended.status, ended.id, ended.errors) == ("completed", batch.id, None)
    assert ended.request_counts.to_dict() == {"total": 5, "completed": 3, "failed": 2}
    moments = [ended.created_at, ended.in_progress_at, ended.finalizing_at, ended.completed_at]
    assert moments == sorted(moments)
    output = server.lines(ended.output_file_id)
    assert [(line["custom_id"], len(line["response"]["body"]["choices"])) for line in output] == [
        ("short", 1),
        ("drawn", 1),
        ("b", 2),
    ]
    usages = [line["response"]["body"]["usage"] for line in output]
    num_input, num_output = (sum(usage[f"{kind}_tokens"] for usage in usages) for kind in ("prompt", "completion"))
    assert ended.usage.to_dict() == {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_input + num_output,
    }
    [model] = client.models.list()
    assert model == client.models.retrieve(tiny_model.name)
    assert (model.id, model.object, ended.model) == (tiny_model.name, "model", tiny_model.name)
    with pytest.raises(openai.NotFoundError, match="The model 'other/model' does not exist"):
        client.models.retrieve("other/model")
    errors = server.lines(ended.error_file_id)
    assert [(line["custom_id"], line["error"]["code"], line["error"]["line"]) for line in errors] == [
        (None, "invalid_json_line", 4),
        ("c", "url_mismatch", 5),
    ]
    assert "'url'" in errors[1]["error"]["message"]
    progress = get(server, f"/v1/batches/{batch.id}/progress")
    assert progress["progress"]["num_generated_tokens"] == 45 + NUM_TOKENS
    assert "<html" in get(server, f"/v1/batches/{batch.id}/report")
    assert "event: batch\ndata: {" in get(server, f"/v1/batches/{batch.id}/events")
    assert client.files.delete(file.id).deleted
    goes_on_after_a_kill(bodies(output), tiny_model, tmp_path)


def goes_on_after_a_kill(undisturbed: dict[str, Any], model: Path, runs: Path) -> None:
    """Kill a server amid the long lines; the next one continues to the same bytes."""
    with serving(runs, model, *OFTEN) as server:
        batch_id = server.create(*LONG)
        finished = until_half_done(runs / "batches" / batch_id)
        [driver] = drivers_of(server)
        server.kill()
        wait_until(lambda: not is_there(driver))  # it must not outlive its server
    with serving(runs, model, *OFTEN) as server:
        assert [batch.id for batch in server.client.batches.list()] == [batch_id]
        ended = server.ended(batch_id)
        output = server.lines(ended.output_file_id)
    assert (ended.status, ended.error_file_id) == ("completed", None)
    assert {path: path.read_bytes() for path in finished} == finished  # nothing twice
    assert max(line["response"]["body"]["metrics"]["num_recovered_tokens"] for line in output) > 0
    assert bodies(output) == {name: undisturbed[name] for name in ("short", "drawn")}


def test_what_a_killed_server_answered_is_in_its_audit_log(tiny_model: Path, tmp_path: Path) -> None:
    def lines() -> list[tuple[str, str]]:
        found = [line for file in sorted((tmp_path / "audit").iterdir()) for line in file.read_text().splitlines()]
        return [(said["action"], said["id"]) for said in map(json.loads, found)]

    with serving(tmp_path, tiny_model) as server:
        file_id = server.upload(request("a"))
        server.kill()
    assert lines() == [("uploaded", file_id)]
    with serving(tmp_path, tiny_model) as server:
        with closing(http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)) as connection:
            for path in ("/v1/files", f"/v1/files/{file_id}/content", "/healthz"):
                connection.request("HEAD", path)  # a body would be the next answer
                answer = connection.getresponse()
                assert (answer.status, answer.read()) == (200, b"")
        batch_id = server.create_from(file_id)
        server.client.batches.cancel(batch_id)
        server.kill()
    assert lines() == [("uploaded", file_id), ("created", batch_id), ("cancelled", batch_id)]


def test_a_batch_of_no_good_line_and_one_of_no_line_fail(server: Server) -> None:
    bad = server.ended(server.create("{torn", request("x", max_tokens=0)))
    assert (bad.status, bad.output_file_id) == ("failed", None)
    problems = [(problem.line, problem.code) for problem in bad.errors.data or []]
    assert problems == [(1, "invalid_json_line"), (2, "invalid_value")]
    empty = server.ended(server.create("", ""))
    assert empty.status == "failed"
    [problem] = empty.errors.data or []
    assert problem.code == "empty_file"
    assert "no jobs" in str(problem.message)
    wide = server.ended(server.create_of(json.dumps(request("x")).encode("utf-16")))
    [problem] = wide.errors.data or []
    assert (wide.status, problem.code) == ("failed", "invalid_input_file")
    assert "found UTF-16 text; expected UTF-8: convert it, as with iconv -f UTF-16 -t UTF-8" in str(problem.message)


def test_a_cancelled_batch_and_an_expired_one_deliver_what_is_finished_and_lists_go_over_pages(server: Server) -> None:
    client = server.client
    late = server.create(request("late", 2000), window="1s")  # it waits for the other's driver, so it runs nothing
    batch_id = server.create(
        request("short", 5, priority=-1), *[request(f"long-{number}", 3500) for number in range(12)]
    )
    queued = server.create(request("queued"))
    are_listed_over_pages(server)
    wait_until(lambda: get(server, f"/v1/batches/{batch_id}/progress")["request_counts"]["completed"])
    wait_until(lambda: [line for line in get(server, f"/v1/batches/{batch_id}/partial")["data"] if line["text"]])
    assert batch_id in json.dumps(get(server, "/sd"))
    assert client.batches.cancel(queued).status in ("cancelling", "cancelled")
    assert client.batches.cancel(batch_id).status == "cancelling"
    ended = server.ended(batch_id)
    assert (ended.status, ended.cancelled_at is not None) == ("cancelled", True)
    output, errors = server.lines(ended.output_file_id), server.lines(ended.error_file_id)
    assert output[0]["custom_id"] == "short"
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert len({line["custom_id"] for line in output + errors}) == len(output) + len(errors) == 13
    assert server.ended(queued).status == "cancelled"
    expired = server.ended(late)
    assert (expired.status, expired.output_file_id) == ("expired", None)
    assert [line["error"]["code"] for line in server.lines(expired.error_file_id)] == ["batch_expired"]


def are_listed_over_pages(server: Server) -> None:
    client = server.client
    ids = [server.upload(request(f"p{number}")) for number in range(5)]
    newest = [file.id for file in client.files.list(limit=2, purpose="batch")]
    assert newest[:5] == ids[::-1]
    assert len(newest) == len(set(newest))
    first = client.files.list(limit=2, order="asc", after=ids[1])
    assert [file.id for file in first.data] == ids[2:4]
    made = [client.batches.create(input_file_id=i, endpoint="/v1/completions", completion_window="1d").id for i in ids]
    assert [batch.id for batch in client.batches.list(limit=2)][:5] == made[::-1]
    for batch_id in made:
        client.batches.cancel(batch_id)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/files/file-1", 404),
        ("/v1/files/..%2f..%2fserve.json", 404),
        ("/v1/files/file-%2e%2e/content", 404),
        ("/v1/batches/batch_1/progress", 404),
        ("/v1/batches?after=batch_1", 400),
        ("/v1/batches?limit=0", 400),
        ("/v1/files?limit=many", 400),
        ("/nowhere", 404),
    ],
)
def test_what_is_not_there_is_told_as_openai_does(server: Server, path: str, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as found:
        get(server, path)
    with found.value as answer:
        error = json.loads(answer.read())["error"]
    assert answer.code == status
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


def test_bad_requests_are_refused_and_leave_nothing(server: Server) -> None:
    import openai

    client = server.client
    file_id = server.upload(request("a"))
    num_files = len(client.files.list().data)
    good: dict[str, Any] = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    for field, value in {"input_file_id": "file-none", "endpoint": "/v1/embeddings", "completion_window": "x"}.items():
        with pytest.raises(openai.APIStatusError) as found:
            client.batches.create(**good | {field: value})
        assert found.value.param == field
    with pytest.raises(openai.BadRequestError, match="colour"):
        client.batches.create(**good, extra_body={"colour": "red"})
    with pytest.raises(openai.BadRequestError, match="expected batch"):
        client.files.create(file=b"x", purpose="fine-tune")
    with pytest.raises((openai.APIStatusError, openai.APIConnectionError)) as long:
        client.files.create(file=b"x" * 10 * MAX_FILE_BYTES, purpose="batch")
    assert getattr(long.value, "status_code", 413) == 413
    assert len(client.files.list().data) == num_files


def test_the_server_says_how_it_is(server: Server) -> None:
    assert get(server, "/healthz") == get(server, "/readyz") == {"status": "ok"}
    metrics = get(server, "/metrics")
    assert 'swiftbatch_serve_requests_total{status="2xx"}' in metrics
    assert 'swiftbatch_serve_batches{stage="running"}' in metrics
