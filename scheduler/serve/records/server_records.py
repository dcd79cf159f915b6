"""A server's records of files and batches; times in seconds since the epoch.

files/<file_id>/content        the bytes
files/<file_id>/file.json      written last: without it the file does not exist
batches/<batch_id>/            a run, and beside it
batches/<batch_id>/batch.json  the request, written once: without it the batch does not exist
batches/<batch_id>/cancel.json the time of a cancellation
batches/<batch_id>/ended.json  the outcome, written last: then nothing else of the batch is read
webhooks/<batch_id>.json       to whom the batch's end is yet to be posted

Ids are random letters and digits; no other name becomes part of a path.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from typing import Literal

from pydantic import Field

from swiftbatch.jobs.checkpoints.timeline import Moment
from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.job import JobUrl
from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.run.error_files import NO_FILE
from swiftbatch.jobs.run.run_records import DamagedError, Model, read_model
from swiftbatch.jobs.storage.store import Store

FILE_ID = re.compile(r"file-[0-9a-f]{24}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
NUM_BYTES = 12

Delivery = Literal["output", "errors"]
"""The two files that a batch ends with."""
Purpose = Literal["batch", "batch_output"]
Target = Literal["server", "batch"]
"""The address of `--webhook` ("server"), or the one that the batch came with ("batch")."""
EndState = Literal["completed", "failed", "expired", "cancelled"]
State = Literal["validating", "in_progress", "finalizing", "cancelling", EndState]

FILES, BATCHES, WEBHOOKS = "files", "batches", "webhooks"
CONTENT, FILE = "content", "file.json"
BATCH, CANCEL, ENDED = "batch.json", "cancel.json", "ended.json"


class RefusedError(UserError):
    """A refused request: HTTP status, parameter and error code."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def new_file_id() -> str:
    return f"file-{secrets.token_hex(NUM_BYTES)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(NUM_BYTES)}"


def id_of_key(kind: Literal["file-", "batch_"], owner: str | None, key: str) -> str:
    """Return the id for an idempotency key."""
    return kind + _digits(json.dumps([owner, key]))


def delivered_file_id(batch_id: str, delivery: Delivery) -> str:
    """Return the fixed id of a batch's result file."""
    return "file-" + _digits(f"{batch_id} {delivery}")


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * NUM_BYTES]


def is_file_id(name: str) -> bool:
    return FILE_ID.fullmatch(name) is not None


def is_batch_id(name: str) -> bool:
    return BATCH_ID.fullmatch(name) is not None


def read_record(store: Store, path: str, model: type[Model]) -> Model | None:
    """Read a record; None if its folder lists none. Raises RunError, StoreError."""
    record = read_model(store, path, model)
    folder, _, name = path.rpartition("/")
    if record is None and name in store.list(folder):
        raise DamagedError(store, path, NO_FILE)
    return record


class FileRecord(Frozen):
    """`file.json`; `owner` is None without keys."""

    version: Literal[1] = 1
    id: str
    created: Moment
    filename: str
    purpose: Purpose
    num_bytes: int = Field(ge=0)
    owner: str | None = None


class BatchRecord(Frozen):
    """`batch.json`; unfinished jobs are given up at `expires`."""

    version: Literal[1] = 1
    id: str
    created: Moment
    input_file_id: str
    endpoint: JobUrl
    completion_window: str
    expires: Moment
    metadata: dict[str, str] | None = None
    owner: str | None = None
    priority: int = 0  # among the owner's batches; lower begins earlier
    webhook: str | None = None  # its end is posted to this address


class Cancellation(Frozen):
    version: Literal[1] = 1
    requested: Moment


class Counts(Frozen):
    """Numbers of a batch's lines; rejects count as failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class LineProblem(Frozen):
    """Why a line, or the whole file for None, failed."""

    code: str
    message: str
    line: int | None = None


class Ended(Frozen):
    """`ended.json`; a file is None if it would be empty."""

    version: Literal[1] = 1
    state: EndState
    counts: Counts
    in_progress: Moment | None
    finalizing: Moment
    ended: Moment
    num_total_tokens: int = 0  # lines that were given up included
    num_generated_tokens: int = 0  # of lines in the output file
    output_file_id: str | None = None
    error_file_id: str | None = None
    problems: tuple[LineProblem, ...] = ()


class PendingMessage(Frozen):
    version: Literal[1] = 1
    targets: tuple[Target, ...]
