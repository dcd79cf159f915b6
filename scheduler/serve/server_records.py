"""The records that a server keeps of files and batches. All moments are in seconds since the epoch.

files/<file_id>/content        the bytes
files/<file_id>/file.json      written last: a file without it is not there
batches/<batch_id>/            a run, and beside it
batches/<batch_id>/batch.json  what was asked for, written once: a batch without it is not there
batches/<batch_id>/cancel.json when it was to be cancelled
batches/<batch_id>/ended.json  how it ended, written last: from then on nothing else of the batch is read

Ids are random, of letters and digits alone. No other name ever becomes part of a path.
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
    """The id of what a request with an idempotency key makes: the same however often it comes, also after a restart."""
    return kind + hashlib.sha256(json.dumps([owner, key]).encode()).hexdigest()[: 2 * NUM_BYTES]


def delivered_file_id(batch_id: str, delivery: Delivery) -> str:
    """The id of a file that a batch ends with: the same however often its end is begun anew."""
    return f"file-{hashlib.sha256(f'{batch_id} {delivery}'.encode()).hexdigest()[: 2 * NUM_BYTES]}"


def is_file_id(name: str) -> bool:
    return FILE_ID.fullmatch(name) is not None


def is_batch_id(name: str) -> bool:
    return BATCH_ID.fullmatch(name) is not None


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


Order = Literal["asc", "desc"]


class Listed(Protocol):
    """A record that a catalogue can hold."""

    @property
    def id(self) -> str: ...
    @property
    def created(self) -> float: ...
    @property
    def owner(self) -> str | None: ...


Record = TypeVar("Record", bound=Listed)


class Catalogue(Generic[Record]):
    """Records by their ids; threads may share it."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._lock = threading.Lock()
        self._by_id = {record.id: record for record in records}
        self._keys = sorted(map(_key, self._by_id.values()))

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, record: Record) -> None:
        """Take a record in, in place of an older one of that id."""
        with self._lock:
            if record.id not in self._by_id:
                bisect.insort(self._keys, _key(record))
            self._by_id[record.id] = record

    def remove(self, record_id: str) -> None:
        """Forget a record; one that is not there is fine."""
        with self._lock:
            record = self._by_id.pop(record_id, None)
            if record is not None:
                del self._keys[bisect.bisect_left(self._keys, _key(record))]

    def get(self, record_id: str, owner: str | None) -> Record | None:
        """The record, if there is one and it is the owner's."""
        record = self._by_id.get(record_id)
        return record if record is not None and record.owner == owner else None

    def all(self) -> list[Record]:
        """All records, oldest first."""
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
        """At most `limit` of the owner's records behind the one with the id `after`, and whether there are more.

        Raises RefusedError where there is none of that id.
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
        """The places of what is behind `after` among the keys."""
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
