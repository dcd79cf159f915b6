from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.runs.run_settings import ServeOptions
from swiftbatch.scheduler.serve.batches.batch_driver import DriverOptions
from swiftbatch.scheduler.serve.batches.service import Service
from swiftbatch.scheduler.serve.server import make_app


def service_on(folder: Path, **options: Any) -> Service:
    return Service(Store(str(folder)), ServeOptions(**options), DriverOptions(), lambda: None, print)


def client_of(service: Service) -> TestClient:
    return TestClient(make_app(service, only_loopback=True), base_url="http://127.0.0.1")


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def upload(client: TestClient, headers: dict[str, str] | None = None, data: bytes = b"{}\n") -> str:
    answer = client.post("/v1/files", files={"file": ("x.jsonl", data)}, data={"purpose": "batch"}, headers=headers)
    assert answer.status_code == 200, answer.text
    file_id: str = answer.json()["id"]
    return file_id


def batch_of(input_file_id: str, **fields: object) -> dict[str, object]:
    return {
        "input_file_id": input_file_id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        **fields,
    }
