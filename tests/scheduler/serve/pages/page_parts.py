from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import unescape
from pathlib import Path

import numpy as np
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.input.rejects import Reject
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.output_line import error_line
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.runs.run_settings import ServeOptions
from swiftbatch.scheduler.serve.batches.batch_driver import DriverOptions
from swiftbatch.scheduler.serve.batches.service import Service
from swiftbatch.scheduler.serve.records.server_records import NewBatch
from swiftbatch.scheduler.serve.records.stored_objects import Batch
from swiftbatch.scheduler.serve.server import make_app
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.jobs.checkpoints.checkpoint_parts import claim
from tests.jobs.run.run_parts import MANIFEST, PROGRESS
from tests.metrics.report_parts import finish, record

SO_FAR = "\n</bdi><script>alert(2)</script> said she"
ORIGIN = "http://127.0.0.1:8080"
TOKEN = re.compile(r'name="form_token" value="([0-9a-f]{64})"')
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</textarea></title></style><script src=//evil.example/x.js></script>",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "a\u202egpj.exe\x00\x1b[31m",
    "&lt;b&gt; ]]> <!--" + "x" * 400,
)


def app_of(runs: Path, api_keys: Path | None = None, webhook_hosts: str | None = None) -> FastAPI:
    options = ServeOptions(api_keys=None if api_keys is None else str(api_keys), webhook_hosts=webhook_hosts)
    service = Service(Store(str(runs)), options, DriverOptions(), lambda: None, _fail)
    return make_app(service, only_loopback=api_keys is None)


def client_of(app: FastAPI) -> TestClient:
    return TestClient(app, base_url=ORIGIN, follow_redirects=False)


def service_of(client: TestClient) -> Service:
    service: Service = client.app.state.service
    return service


def token_of(client: TestClient, path: str = "/") -> str:
    return TOKEN.search(client.get(path).text)[1]


def new_batch(
    service: Service, filename: str = "jobs.jsonl", metadata: dict[str, str] | None = None, owner: str | None = None
) -> Batch:
    file = service.files.add(io.BytesIO(b"{}\n"), filename, "batch", owner)
    new = NewBatch(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata=metadata)
    return service.batches.create(new, new.seconds, owner)


def submit(batch: Batch, names: Sequence[str], rejects: Sequence[Reject] = ()) -> tuple[Run, list[JobRecord]]:
    run = Run.planned(batch.store.uri, MANIFEST.model_copy(update={"created": time.time()})).made()
    records = [record(name) for name in names]
    run.add_jobs(records)
    run.write_rejects(rejects)
    return run, records


def in_progress(service: Service, names: Sequence[str] = ("done", "going", "lost", "waiting")) -> Batch:
    """Make a batch with a finished, a running and a failed job."""
    batch = new_batch(service, metadata={"name": "Letters"})
    run, records = submit(batch, names, [Reject(9, "torn", "not JSON")])
    finish(run, records[0], [], time.time())
    run.write_error(records[2].job_id, error_line(records[2], "attempts_failed", "its worker died"))
    write_text(run, records[1], SO_FAR)
    beat = {"num_generated_tokens": 1400, "num_tokens_left": 1600, "tokens_per_second": 12.5, "eta_seconds": 128.0}
    beat |= {"running": {names[1]: 400}, "jobs": {"pending": len(names) - 3, "running": 1, "finished": 1, "failed": 1}}
    run.write_progress(PROGRESS.model_copy(update=beat | {"updated": time.time()}))
    return batch


def write_text(run: Run, job: JobRecord, text: str) -> None:
    checkpoints = CheckpointStore.of(run)
    tokens = TextCodec(locate_model("embedded")).encode_one(text).token_ids
    checkpoints.write_tokens(job.job_id, claim(checkpoints, job.job_id, "w1"), np.array(tokens, dtype=np.uint32))


def words_of(page: str) -> str:
    return " ".join(unescape(re.sub("<[^>]*>", " ", page)).split())


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Serve the app on a real port; yield its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        host, port = server.servers[0].sockets[0].getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = server.force_exit = True  # a browser may hold its connections open
        thread.join()


def _fail(error: Exception) -> None:
    raise AssertionError from error
