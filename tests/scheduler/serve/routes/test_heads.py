from __future__ import annotations

from pathlib import Path

from tests.scheduler.serve.api_parts import batch_of, client_of, service_on, upload
from tests.scheduler.serve.batch_parts import submit_two


def test_a_head_is_answered_as_a_get_without_a_body(tiny_model: Path, tmp_path: Path) -> None:
    service = service_on(tmp_path / "runs")
    client = client_of(service)
    file_id = upload(client)
    batch_id = client.post("/v1/batches", json=batch_of(file_id)).json()["id"]
    submit_two(service.batches.get(batch_id, None), tiny_model, tmp_path, 1)
    files, batch = f"/v1/files/{file_id}", f"/v1/batches/{batch_id}"
    paths = ["/v1/files", files, f"{files}/content", "/v1/batches", batch, "/v1/batches/none", "/page.css", "/healthz"]
    paths += [f"{batch}/{part}" for part in ("progress", "partial", "report")]
    paths += ["/v1/models", "/v1/models/embedded", "/", f"/batches/{batch_id}", f"/batches/{batch_id}/report", "/sd"]
    for path in [*paths, "/login", "/metrics"]:
        head, get = client.head(path), client.get(path)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        assert head.headers["content-type"] == get.headers["content-type"], path
    events = client.head(f"{batch}/events")  # a GET would last as long as the batch
    assert (events.status_code, events.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
