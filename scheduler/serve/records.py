"""The records that a server keeps of files and batches. All moments are in seconds since the epoch.

files/<file_id>/content        the bytes
files/<file_id>/file.json      written last: a file without it is not there
batches/<batch_id>/            a run, and beside it
batches/<batch_id>/batch.json  what was asked for, written once: a batch without it is not there
batches/<batch_id>/cancel.json when it was to be cancelled
batches/<batch_id>/ended.json  how it ended, written last: from then on nothing else of the batch is read
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from swiftbatch.jobs.checkpoints.timeline import Moment
from swiftbatch.jobs.frozen import Frozen
from swiftbatch.jobs.job import JobUrl
from swiftbatch.jobs.run.line_files import NO_FILE
from swiftbatch.jobs.run.run_files import DamagedError, Model, read_model
from swiftbatch.jobs.storage.store import Store

Purpose = Literal["batch", "batch_output"]
EndState = Literal["completed", "failed", "expired", "cancelled"]
State = Literal["validating", "in_progress", "finalizing", "cancelling", EndState]
STATES: tuple[State, ...] = (
    *("validating", "in_progress", "finalizing", "cancelling"),
    *("completed", "failed", "expired", "cancelled"),
)

FILES, BATCHES = "files", "batches"
CONTENT, FILE = "content", "file.json"
BATCH, CANCEL, ENDED = "batch.json", "cancel.json", "ended.json"


def read_record(store: Store, path: str, model: type[Model]) -> Model | None:
    """A record; None where it is absent, which costs a look into its folder. Raises RunError, StoreError."""
    record = read_model(store, path, model)
    folder, _, name = path.rpartition("/")
    if record is None and name in store.list(folder):
        raise DamagedError(store, path, NO_FILE)
    return record


class FileRecord(Frozen):
    """`file.json`. `owner` is None where nobody has a key."""

    version: Literal[1] = 1
    id: str
    created: Moment
    filename: str
    purpose: Purpose
    num_bytes: int = Field(ge=0)
    owner: str | None = None


class BatchRecord(Frozen):
    """`batch.json`. What is unfinished at `expires` is given up."""

    version: Literal[1] = 1
    id: str
    created: Moment
    input_file_id: str
    endpoint: JobUrl
    completion_window: str
    expires: Moment
    metadata: dict[str, str] | None = None
    owner: str | None = None
    priority: int = 0  # among the owner's: lower begins earlier
    webhook: str | None = None  # address that its end is posted to


class Cancellation(Frozen):
    """`cancel.json`."""

    version: Literal[1] = 1
    requested: Moment


class Counts(Frozen):
    """Lines of a batch, by what became of them; rejects are among the failed ones."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class LineProblem(Frozen):
    """The reason why a line, or for None the file, could not be run."""

    code: str
    message: str
    line: int | None = None


class Ended(Frozen):
    """`ended.json`. The files are None where no line went there."""

    version: Literal[1] = 1
    state: EndState
    counts: Counts
    in_progress: Moment | None
    finalizing: Moment
    ended: Moment
    num_total_tokens: int = 0  # generated in all, those of lines that were given up included
    num_generated_tokens: int = 0  # of the lines in the output file
    output_file_id: str | None = None
    error_file_id: str | None = None
    problems: tuple[LineProblem, ...] = ()
