"""A server's files: uploads, and results of batches."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from swiftbatch.jobs.input.job_files import joined
from swiftbatch.jobs.run.run_records import NUM_READERS, RunError, pretty
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.process.streams import Lines
from swiftbatch.scheduler.serve.client_errors import RefusedError, no_such_file, other_request
from swiftbatch.scheduler.serve.server_records import (
    CONTENT,
    FILE,
    FILES,
    Catalogue,
    FileRecord,
    Order,
    Purpose,
    id_of_key,
    is_file_id,
    new_file_id,
    read_record,
)


class StoredFiles:
    """The files below `files/`. Methods raise StoreError."""

    def __init__(self, store: Store) -> None:
        """Read the files, and delete uploads that a kill cut off."""
        self._store = store
        self._adding = threading.Lock()  # lets only one of two requests with one key add the file
        names = [name for name in store.list(FILES) if is_file_id(name)]
        with ThreadPoolExecutor(NUM_READERS) as pool:
            records = list(pool.map(self._read, names))
        self._catalogue = Catalogue(record for record in records if record is not None)

    def __len__(self) -> int:
        return len(self._catalogue)

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
        self._catalogue.add(record)
        return record

    def add_once(self, source: BinaryIO, filename: str, owner: str | None, key: str) -> FileRecord:
        """Store a job file, or return an earlier request's. Raises RefusedError for another file."""
        file_id = id_of_key("file-", owner, key)
        with self._adding:
            known = self._catalogue.get(file_id, owner)
            if known is None:
                return self.add(source, filename, "batch", owner, file_id)
        pieces = self.content(known)
        if known.filename != filename or any(source.read(len(piece)) != piece for piece in pieces) or source.read(1):
            raise other_request(key)
        return known

    def get(self, file_id: str, owner: str | None, param: str = "id") -> FileRecord:
        """Return the owner's file. Raises RefusedError if there is none."""
        record = self._catalogue.get(file_id, owner)
        if record is None:
            raise no_such_file(file_id, param)
        return record

    def page(
        self, owner: str | None, after: str | None, limit: int, order: Order, purpose: str | None
    ) -> tuple[list[FileRecord], bool]:
        return self._catalogue.page(owner, after, limit, order, lambda file: purpose in (None, file.purpose))

    def content(self, record: FileRecord, part: range | None = None) -> Generator[bytes, None, None]:
        """Yield the bytes or a range in pieces.

        Raises RefusedError if the size is wrong or the file is gone.
        """
        self.check(record)
        places = range(record.num_bytes) if part is None else part
        pieces = self._store.pieces(f"{FILES}/{record.id}/{CONTENT}", places.start, len(places))
        if pieces is None:
            raise no_such_file(record.id)
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
        self._catalogue.remove(record.id)
        self._store.delete_folder(f"{FILES}/{record.id}")

    def _read(self, name: str) -> FileRecord | None:
        """Return None if damaged or incomplete."""
        try:
            record = read_record(self._store, f"{FILES}/{name}/{FILE}", FileRecord)
        except RunError as error:
            Lines(sys.stderr).write(f"{name} is left out until the server is started again: {error}")
            return None
        if record is None:
            self._store.delete_folder(f"{FILES}/{name}")
        return record
