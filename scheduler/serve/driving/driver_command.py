"""The command that runs a batch: `submit` until all lines are in the run, from then on `resume`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from swiftbatch.scheduler.serve.batch_status import is_submitted
from swiftbatch.scheduler.serve.batches import Batch
from swiftbatch.scheduler.serve.files import Files


@dataclass(frozen=True)
class DriverOptions:
    """The words of the server's own command line that its drivers get: those that a run keeps, and those of a start."""

    of_run: tuple[str, ...] = ()
    of_start: tuple[str, ...] = ()
    grace_seconds: float = 20.0


def driver_arguments(batch: Batch, files: Files, options: DriverOptions) -> list[str]:
    """The arguments of `swiftbatch`. Raises StoreError.

    A killed `submit` may have left anything: the same file again completes it. `resume` needs the file no more.
    """
    run_uri, record = batch.store.uri, batch.record
    deadline = datetime.fromtimestamp(record.expires, UTC).isoformat()
    start = [*options.of_start, "--takeover", "--json", "--deadline", deadline]
    if is_submitted(batch.store):
        return ["resume", run_uri, *start]
    input_uri = files.uri(record.input_file_id)
    return ["submit", input_uri, "--run", run_uri, "--endpoint", record.endpoint, *options.of_run, *start]
