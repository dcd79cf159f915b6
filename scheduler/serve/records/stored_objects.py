"""A server's files, and its batches with a run folder each."""

from __future__ import annotations

import bisect
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import BinaryIO, Generic, Literal, Protocol, TypeVar

from swiftbatch.jobs.input.job_files import joined
from swiftbatch.jobs.run.error_files import DAMAGED
from swiftbatch.jobs.run.run_records import DamagedError, RunError, in_parallel, pretty, read_model
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.driver.run_limits import Deadline, steady_seconds
from swiftbatch.scheduler.process.streams import Lines
from swiftbatch.scheduler.serve.records.server_records import (
    BATCH,
    BATCHES,
    CANCEL,
    CONTENT,
    ENDED,
    FILE,
    FILES,
    BatchRecord,
    Cancellation,
    Ended,
    FileRecord,
    NewBatch,
    Purpose,
    RefusedError,
    id_of_key,
    is_batch_id,
    is_file_id,
    new_batch_id,
    new_file_id,
    read_record,
)

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

    def enter(self, record: Record) -> None:
        with self._lock:
            if record.id not in self._by_id:
                bisect.insort(self._keys, _key(record))
            self._by_id[record.id] = record

    def remove(self, record_id: str) -> None:
        with self._lock:
            record = self._by_id.pop(record_id, None)
            if record is not None:
                del self._keys[bisect.bisect_left(self._keys, _key(record))]

    def find(self, record_id: str, owner: str | None) -> Record | None:
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
        order: Order = "desc",
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
            record = self.find(after, owner)
            if record is None:
                problem = f"after: found {after[:80]!a}, expected the id of an object in this list"
                raise RefusedError(problem, param="after")
            place = bisect.bisect_left(self._keys, _key(record))
            first, end = (place + 1, end) if order == "asc" else (first, place)
        return range(first, end) if order == "asc" else range(end - 1, first - 1, -1)


def _key(record: Listed) -> tuple[float, str]:
    return record.created, record.id


def _read_all(names: Iterable[str], read: Callable[[str], Record | None]) -> list[Record]:
    """Leave damaged records out, and say so."""

    def read_or_tell(name: str) -> Record | None:
        try:
            return read(name)
        except RunError as error:
            Lines(sys.stderr).write(f"{name} is left out until the server is started again: {error}")
            return None

    return [record for record in in_parallel(read_or_tell, names) if record is not None]


class StoredFiles(Catalogue[FileRecord]):
    """The uploads and results below `files/`. Methods raise StoreError."""

    def __init__(self, store: Store) -> None:
        """Read the files, and delete uploads that a kill cut off."""
        self._store = store
        self._adding = threading.Lock()  # lets only one of two requests with one key add the file
        super().__init__(_read_all(filter(is_file_id, store.list(FILES)), self._read))

    def add(
        self,
        source: BinaryIO,
        filename: str,
        purpose: Purpose,
        owner: str | None,
        file_id: str | None = None,
    ) -> FileRecord:
        """Store the rest of the seekable `source`; `filename` is only text."""
        start = source.tell()
        num_bytes = source.seek(0, 2) - start
        source.seek(start)
        file_id = file_id or new_file_id()
        record = FileRecord(
            id=file_id, created=time.time(), filename=filename, purpose=purpose, num_bytes=num_bytes, owner=owner
        )
        self._store.write_from(f"{FILES}/{file_id}/{CONTENT}", source)
        self._store.write(f"{FILES}/{file_id}/{FILE}", pretty(record))
        self.enter(record)
        return record

    def add_once(self, source: BinaryIO, filename: str, owner: str | None, key: str) -> tuple[FileRecord, bool]:
        """Store a job file, or find an earlier request's; return it, and whether it is new.

        Raises RefusedError for another file.
        """
        file_id = id_of_key("file-", owner, key)
        with self._adding:
            known = self.find(file_id, owner)
            if known is None:
                return self.add(source, filename, "batch", owner, file_id), True
        pieces = self.content(known)
        if known.filename != filename or any(source.read(len(piece)) != piece for piece in pieces) or source.read(1):
            raise _other_request(key)
        return known, False

    def get(self, file_id: str, owner: str | None, param: str = "id") -> FileRecord:
        """Return the owner's file. Raises RefusedError if there is none."""
        record = self.find(file_id, owner)
        if record is None:
            raise _no_such_file(file_id, param)
        return record

    def content(self, record: FileRecord, part: range | None = None) -> Generator[bytes, None, None]:
        """Yield the bytes or a range in pieces.

        Raises RefusedError if the size is wrong or the file is gone.
        """
        self.check(record)
        places = range(record.num_bytes) if part is None else part
        pieces = self._store.pieces(f"{FILES}/{record.id}/{CONTENT}", places.start, len(places))
        if pieces is None:
            raise _no_such_file(record.id)
        return pieces

    def check(self, record: FileRecord) -> None:
        """Raise RefusedError if a file's size is wrong."""
        num_bytes = self._store.sizes(f"{FILES}/{record.id}").get(CONTENT)
        if num_bytes is not None and num_bytes != record.num_bytes:
            problem = f"found {num_bytes:,} bytes, expected {record.num_bytes:,}"
            Lines(sys.stderr).write(f"{FILES}/{record.id}/{CONTENT} is damaged: {problem}")
            raise RefusedError(f"{record.id} is damaged: {problem}", 410, code="damaged_file")

    def uri(self, file_id: str) -> str:
        return joined(self._store.uri, f"{FILES}/{file_id}/{CONTENT}")

    def delete(self, record: FileRecord) -> None:
        """Delete the record, which removes the file, then its bytes."""
        self._store.delete(f"{FILES}/{record.id}/{FILE}")
        self.remove(record.id)
        self._store.delete_folder(f"{FILES}/{record.id}")

    def _read(self, name: str) -> FileRecord | None:
        record = read_record(self._store, f"{FILES}/{name}/{FILE}", FileRecord)
        if record is None:
            self._store.delete_folder(f"{FILES}/{name}")
        return record


def _no_such_file(file_id: str, param: str = "id") -> RefusedError:
    return RefusedError(f"No such File object: {file_id[:80]}", 404, param)


def _other_request(key: str) -> RefusedError:
    return RefusedError(
        f"Idempotency-Key: {key[:80]!a} came with another request before; expected the same request, or another key",
        422,
        "Idempotency-Key",
        "idempotency_key_reused",
    )


@dataclass
class Batch:
    """One batch with its folder, request, and the server's records."""

    record: BatchRecord
    store: Store
    cancellation: Cancellation | None = None
    ended: Ended | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    _deadline: Deadline = field(init=False)

    def __post_init__(self) -> None:
        seconds_left = self.record.expires - time.time()
        self._deadline = Deadline(self.record.expires, steady_seconds() + seconds_left)

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def created(self) -> float:
        return self.record.created

    @property
    def owner(self) -> str | None:
        return self.record.owner

    @property
    def seconds_left(self) -> float:
        return self._deadline.seconds_left()

    def has_expired(self) -> bool:
        return self._deadline.has_passed()


class Batches(Catalogue[Batch]):
    """The batches below `batches/`. Methods raise StoreError."""

    def __init__(
        self,
        store: Store,
        note_end: Callable[[Batch], None],
        prepare_end: Callable[[Batch], None] = lambda batch: None,
    ) -> None:
        """Read the batches; `prepare_end` and `note_end` are called before and after each later end."""
        self._store = store
        self._note_end, self._prepare_end = note_end, prepare_end
        super().__init__(_read_all(filter(is_batch_id, store.list(BATCHES)), self._read))

    def create(self, new: NewBatch, seconds: float, owner: str | None, key: str | None = None) -> Batch:
        """Create and store a batch with a limit of `seconds`; if the idempotency `key` is known, return its batch.

        Raises RefusedError if the known batch is of another request, or damaged.
        """
        now = time.time()
        batch_id = new_batch_id() if key is None else id_of_key("batch_", owner, key)
        said = new.model_dump(exclude={"output_expires_after"})
        record = BatchRecord(id=batch_id, created=now, expires=now + seconds, owner=owner, **said)
        known = None if key is None else self.with_key(owner, key)
        if known is not None:
            if known.record != record.model_copy(update=known.record.model_dump(include={"created", "expires"})):
                raise _other_request(str(key))
            return known
        batch = Batch(record, self._folder(batch_id))
        batch.store.write(BATCH, pretty(record))
        self.enter(batch)
        return batch

    def with_key(self, owner: str | None, key: str) -> Batch | None:
        """Return the batch of an earlier request. Raises RefusedError if damaged."""
        batch_id = id_of_key("batch_", owner, key)
        known = self.find(batch_id, owner)
        if known is None:  # the store may have failed after writing it
            for known in _read_all([batch_id], self._read):
                self.enter(known)
        if known is None and self._folder(batch_id).exists(BATCH):
            raise RefusedError(f"{batch_id}, which this Idempotency-Key has made, is damaged", 409, code="damaged_run")
        return known

    def get(self, batch_id: str, owner: str | None) -> Batch:
        """Return the owner's batch. Raises RefusedError if there is none."""
        batch = self.find(batch_id, owner)
        if batch is None:
            raise RefusedError(f"No batch found with id '{batch_id[:80]}'.", 404, "batch_id")
        return batch

    def unfinished(self) -> list[Batch]:
        return [batch for batch in self.all() if batch.ended is None]

    def request_cancel(self, batch: Batch, requested_by: str | None = None) -> bool:
        """Record a cancellation; return False if the batch has ended or has one."""
        with batch.lock:
            if batch.ended is not None or batch.cancellation is not None:
                return False
            cancellation = Cancellation(requested=time.time(), requested_by=requested_by)
            batch.store.write(CANCEL, pretty(cancellation))
            batch.cancellation = cancellation
            return True

    def end(self, batch: Batch, ended: Ended) -> None:
        with batch.lock:
            self._prepare_end(batch)
            batch.store.write(ENDED, pretty(ended))
            batch.ended = ended
        self._note_end(batch)

    def _folder(self, batch_id: str) -> Store:
        return Store(joined(self._store.uri, f"{BATCHES}/{batch_id}"))

    def _read(self, name: str) -> Batch | None:
        store = self._folder(name)
        record = read_record(store, BATCH, BatchRecord)
        if record is None:
            return None
        ended = _ended(store)
        return Batch(record, store, _cancellation(store, record, ended), ended)


def _cancellation(store: Store, record: BatchRecord, ended: Ended | None) -> Cancellation | None:
    """A damaged cancellation counts."""
    read = read_record if ended is None else read_model  # skips the folders of thousands of ended batches
    try:
        return read(store, CANCEL, Cancellation)
    except DamagedError as error:
        Lines(sys.stderr).write(f"{record.id} was to be cancelled: {error}")
        return Cancellation(requested=record.created)


def _ended(store: Store) -> Ended | None:
    """Move a damaged end away."""
    try:
        return read_record(store, ENDED, Ended)
    except DamagedError as error:
        aside = f"{DAMAGED}/{time.time_ns()}-{ENDED}"
        store.move(ENDED, aside)  # a file can't replace a folder
        Lines(sys.stderr).write(f"the end of a batch is made anew, the old one kept as {aside}: {error}")
        return None
