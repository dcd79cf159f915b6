"""A server's records of files and batches; times in seconds since the epoch.

files/<file_id>/content        the bytes
files/<file_id>/file.json      written last: without it the file does not exist
batches/<batch_id>/            a run, and beside it
batches/<batch_id>/batch.json  the request, written once: without it the batch does not exist
batches/<batch_id>/cancel.json the time of a cancellation
batches/<batch_id>/ended.json  the outcome, written last: then nothing else of the batch is read

Ids are random letters and digits; no other name becomes part of a path.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterable
from typing import Generic, Literal, Protocol, TypeVar

from pydantic import Field

from swiftbatch.jobs.checkpoints.timeline import Moment
from swiftbatch.jobs.job import JobUrl
from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.run.error_files import NO_FILE
from swiftbatch.jobs.run.run_records import DamagedError, Model, read_model
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.serve.client_errors import RefusedError

FILE_ID = re.compile(r"file-[0-9a-f]{24}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
NUM_BYTES = 12

Delivery = Literal["output", "errors"]
"""The two files that a batch ends with."""
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


def new_file_id() -> str:
    return f"file-{secrets.token_hex(NUM_BYTES)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(NUM_BYTES)}"


def id_of_key(kind: Literal["file-", "batch_"], owner: str | None, key: str) -> str:
    """Return the id for an idempotency key."""
    return kind + hashlib.sha256(json.dumps([owner, key]).encode()).hexdigest()[: 2 * NUM_BYTES]


def delivered_file_id(batch_id: str, delivery: Delivery) -> str:
    """Return the fixed id of a batch's result file."""
    return f"file-{hashlib.sha256(f'{batch_id} {delivery}'.encode()).hexdigest()[: 2 * NUM_BYTES]}"


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


Order = Literal["asc", "desc"]


class Listed(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def created(self) -> float: ...
    @property
    def owner(self) -> str | None: ...


Record = TypeVar("Record", bound=Listed)


class Catalogue(Generic[Record]):
    """Records by id; thread-safe."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._lock = threading.Lock()
        self._by_id = {record.id: record for record in records}
        self._keys = sorted(map(_key, self._by_id.values()))

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, record: Record) -> None:
        with self._lock:
            if record.id not in self._by_id:
                bisect.insort(self._keys, _key(record))
            self._by_id[record.id] = record

    def remove(self, record_id: str) -> None:
        with self._lock:
            record = self._by_id.pop(record_id, None)
            if record is not None:
                del self._keys[bisect.bisect_left(self._keys, _key(record))]

    def get(self, record_id: str, owner: str | None) -> Record | None:
        record = self._by_id.get(record_id)
        return record if record is not None and record.owner == owner else None

    def all(self) -> list[Record]:
        with self._lock:
            return [self._by_id[record_id] for _, record_id in self._keys]

    def page(
        self,
        owner: str | None,
        after: str | None,
        limit: int,
        order: Order,
        is_wanted: Callable[[Record], bool] = lambda _: True,
    ) -> tuple[list[Record], bool]:
        """Return up to `limit` records after the id `after`, and whether there are more.

        Raises RefusedError for an unknown id.
        """
        with self._lock:
            found: list[Record] = []
            for place in self._places(owner, after, order):
                record = self._by_id[self._keys[place][1]]
                if record.owner != owner or not is_wanted(record):
                    continue
                if len(found) == limit:
                    return found, True
                found.append(record)
            return found, False

    def _places(self, owner: str | None, after: str | None, order: Order) -> range:
        """Return the range of keys after `after`."""
        first, end = 0, len(self._keys)
        if after is not None:
            record = self.get(after, owner)
            if record is None:
                problem = f"after: found {after[:80]!a}, expected the id of an object in this list"
                raise RefusedError(problem, param="after")
            place = bisect.bisect_left(self._keys, _key(record))
            first, end = (place + 1, end) if order == "asc" else (first, place)
        return range(first, end) if order == "asc" else range(end - 1, first - 1, -1)


def _key(record: Listed) -> tuple[float, str]:
    return record.created, record.id
