from __future__ import annotations

import io
import json
import time
from pathlib import Path

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.driver.run_lease import current_progress
from swiftbatch.scheduler.serve.records.server_records import CANCEL, Cancellation, NewBatch
from swiftbatch.scheduler.serve.records.stored_objects import Batch, Batches, StoredFiles
from tests.scheduler.commands.command_parts import finish
from tests.scheduler.commands.submit_parts import submit_file
from tests.scheduler.serve.server_parts import request


class Folder:
    def __init__(self, uri: str) -> None:
        self.store = Store(uri)
        self.files = StoredFiles(self.store)
        self.batches = Batches(self.store, lambda state: None)

    def again(self) -> Folder:
        return Folder(self.store.uri)

    def create(self, seconds: float = 3600, owner: str | None = None) -> Batch:
        file = self.files.add(io.BytesIO(b"{}\n"), "jobs.jsonl", "batch", owner)
        new = NewBatch(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")
        return self.batches.create(new, seconds, owner)

    def found(self, batch: Batch) -> Batch:
        """Read the batch as the next server does."""
        return self.again().batches.get(batch.id, None)


def submit(batch: Batch, model: Path, tmp_path: Path, *lines: object) -> Run:
    """Put lines into a batch's run, as its driver does first."""
    path = tmp_path / f"{batch.id}.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return submit_file(str(path), batch.store.uri, model=str(model)).run


def submit_two(batch: Batch, model: Path, tmp_path: Path, num_finished: int) -> Run:
    run = submit(batch, model, tmp_path, request("a"), request("b"), "{torn")
    for custom_id in ("a", "b")[:num_finished]:
        finish(run, custom_id, f"text of {custom_id}")
    return run


def cancel(batch: Batch) -> None:
    batch.store.write(CANCEL, Cancellation(requested=time.time()).model_dump_json().encode())


def worked(run: Run, num_tokens: int, seconds: float, **fields: object) -> None:
    """Write the last heartbeat of a driver that was killed."""
    figures = {"state": "running", "num_total_tokens": num_tokens, "worker_seconds": seconds, "driver_pid": 2**22 + 1}
    run.write_progress(current_progress(run).model_copy(update=figures | fields))
