"""The batches of a server, a run folder each."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from swiftbatch.jobs.input.job_files import joined
from swiftbatch.jobs.job import JobUrl
from swiftbatch.jobs.run.error_files import DAMAGED
from swiftbatch.jobs.run.run_records import NUM_READERS, DamagedError, RunError, pretty, read_model
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.driver.run_limits import Deadline, steady_seconds
from swiftbatch.scheduler.process.streams import Lines
from swiftbatch.scheduler.serve.client_errors import RefusedError, no_such_batch, other_request
from swiftbatch.scheduler.serve.server_records import (
    BATCH,
    BATCHES,
    CANCEL,
    ENDED,
    BatchRecord,
    Cancellation,
    Catalogue,
    Ended,
    Order,
    id_of_key,
    is_batch_id,
    new_batch_id,
    read_record,
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

    def has_expired(self) -> bool:
        """Return whether its time limit has passed."""
        return self._deadline.has_passed()

    @property
    def seconds_left(self) -> float:
        return self._deadline.seconds_left()


class Batches:
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
        names = [name for name in store.list(BATCHES) if is_batch_id(name)]
        with ThreadPoolExecutor(NUM_READERS) as pool:
            found = list(pool.map(self._read, names))
        self._catalogue = Catalogue(batch for batch in found if batch is not None)

    def __len__(self) -> int:
        return len(self._catalogue)

    def create(
        self,
        input_file_id: str,
        endpoint: JobUrl,
        completion_window: str,
        seconds: float,
        metadata: Mapping[str, str] | None,
        owner: str | None,
        priority: int = 0,
        webhook: str | None = None,
        key: str | None = None,
    ) -> Batch:
        """Create and store a batch that may take `seconds`, or return that of the `key`.

        Raises RefusedError if that came from another request or is damaged.
        """
        now = time.time()
        record = BatchRecord(
            id=new_batch_id() if key is None else id_of_key("batch_", owner, key),
            created=now,
            input_file_id=input_file_id,
            endpoint=endpoint,
            completion_window=completion_window,
            expires=now + seconds,
            metadata=None if metadata is None else dict(metadata),
            owner=owner,
            priority=priority,
            webhook=webhook,
        )
        known = None if key is None else self.with_key(owner, key)
        if known is not None:
            if known.record != record.model_copy(update=known.record.model_dump(include={"created", "expires"})):
                raise other_request(str(key))
            return known
        batch = Batch(record, self._folder(record.id))
        batch.store.write(BATCH, pretty(record))
        self._catalogue.add(batch)
        return batch

    def with_key(self, owner: str | None, key: str) -> Batch | None:
        """Return the batch of an earlier request. Raises RefusedError if damaged."""
        batch_id = id_of_key("batch_", owner, key)
        known = self._catalogue.get(batch_id, owner)
        if known is None and (known := self._read(batch_id)) is not None:  # the store had failed after writing it
            self._catalogue.add(known)
        if known is None and self._folder(batch_id).exists(BATCH):
            raise RefusedError(f"{batch_id}, which this Idempotency-Key has made, is damaged", 409, code="damaged_run")
        return known

    def get(self, batch_id: str, owner: str | None) -> Batch:
        """Return the owner's batch. Raises RefusedError if there is none."""
        batch = self._catalogue.get(batch_id, owner)
        if batch is None:
            raise no_such_batch(batch_id)
        return batch

    def page(self, owner: str | None, after: str | None, limit: int, order: Order) -> tuple[list[Batch], bool]:
        return self._catalogue.page(owner, after, limit, order)

    def all(self) -> list[Batch]:
        return self._catalogue.all()

    def unfinished(self) -> list[Batch]:
        return [batch for batch in self.all() if batch.ended is None]

    def request_cancel(self, batch: Batch) -> None:
        """Record a cancellation, unless the batch has ended."""
        with batch.lock:
            if batch.ended is None and batch.cancellation is None:
                cancellation = Cancellation(requested=time.time())
                batch.store.write(CANCEL, pretty(cancellation))
                batch.cancellation = cancellation

    def end(self, batch: Batch, ended: Ended) -> None:
        with batch.lock:
            self._prepare_end(batch)
            batch.store.write(ENDED, pretty(ended))
            batch.ended = ended
        self._note_end(batch)

    def _folder(self, batch_id: str) -> Store:
        return Store(joined(self._store.uri, f"{BATCHES}/{batch_id}"))

    def _read(self, name: str) -> Batch | None:
        """Return None without a readable record."""
        store = self._folder(name)
        try:
            record = read_record(store, BATCH, BatchRecord)
            if record is None:
                return None
            ended = _ended(store)
            return Batch(record, store, _cancellation(store, record, ended), ended)
        except RunError as error:
            Lines(sys.stderr).write(f"{name} is left out until the server is started again: {error}")
            return None


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
