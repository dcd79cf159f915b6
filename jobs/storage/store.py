"""Narrow, atomic file access inside one folder, on a disk or in an object store."""

from __future__ import annotations

import builtins
import errno
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from io import SEEK_SET, BufferedReader, BytesIO, RawIOBase
from tempfile import SpooledTemporaryFile
from typing import IO, Any, BinaryIO, Protocol, TypeVar, cast

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.storage.folder_uri import hidden_credentials, local_path, shown_uri
from swiftbatch.jobs.storage.local_folder import COPY_BYTES, LocalFolder, LocalReader
from swiftbatch.jobs.storage.retries import BRIEF_RETRIES, NO_RETRIES, Retries, is_transient


class ReadableFile(Protocol):
    def seek(self, position: int, /) -> object:
        """Go to the offset `position` from the beginning."""

    def read(self, size: int, /) -> bytes | None:
        """Return at most `size` of the next bytes, or b"" at the end."""

    def close(self) -> None:
        """Close the file."""


class Folder(Protocol):
    """Files below one folder, each there as a whole or not at all.

    Methods raise OSError, or the storage library's errors, without retries.
    """

    def write(self, path: str, data: bytes | memoryview) -> None:
        """Write a file, perhaps over an older one."""

    def write_from(self, path: str, source: BinaryIO) -> None:
        """Write the rest of an open file."""

    def write_new_from(self, path: str, source: BinaryIO) -> bool:
        """Write the rest of an open file, or return False if the path exists. Of several writers, one wins."""

    def read(self, path: str) -> bytes | None:
        """Return a file's content, or None if the file does not exist."""

    def read_part(self, path: str, start: int, length: int) -> bytes | None:
        """Return `length` bytes from `start` on, fewer at the end, or None if there is no such file."""

    def open(self, path: str) -> ReadableFile | None:
        """Open a file to read, or return None if the file does not exist."""

    def exists(self, path: str) -> bool:
        """Return whether there is such a file."""

    def list(self, folder: str) -> list[str]:
        """Return the names in a folder, unordered; an absent folder has no names."""

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return the names in a folder with each file's bytes, or None for a subfolder."""

    def move(self, path: str, target: str) -> bool:
        """Move a file; return False if it does not exist."""

    def delete_leftovers(self, folder: str, min_age_seconds: float) -> None:
        """Delete unfinished files of ended writers that are at least `min_age_seconds` old."""

    def delete(self, path: str) -> None:
        """Delete a file if it exists."""

    def delete_folder(self, folder: str) -> None:
        """Delete a folder and its content if it exists."""


Result = TypeVar("Result")


class _SeekableFile(RawIOBase):
    """Local file whose reads `patiently` retries."""

    def __init__(self, source: LocalReader, patiently: Callable[[Callable[[], Any]], Any]) -> None:
        self._source, self._patiently = source, patiently

    def readinto(self, buffer: Any, /) -> int:
        data: bytes = self._patiently(lambda: self._source.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        place: int = self._patiently(lambda: self._source.seek(offset, whence))
        return place

    def tell(self) -> int:
        return self._source.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._source.close()
        super().close()


READING = {"read", "look up", "list"}
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


class StoreError(UserError):
    """A failed read or write of a run's file, without credentials."""


class Store:
    """Files below one folder. A reader sees a file whole or not at all, however its writer ended.

    Names in paths are not empty and do not start with '.', so no path leaves the folder. Methods raise `StoreError` for
    a refused path, and when `retries` are used up. Threads may share a store.
    """

    def __init__(self, uri: str, retries: Retries | None = None) -> None:
        """`uri` is a local path, `file://`, `s3://`, `gs://` or `az://`; nothing is created yet.

        By default, reads and writes to object stores are retried for a few seconds; a full disk should show at once.
        """
        self.shown_uri = shown_uri(uri)
        try:
            path = local_path(uri)
            self._retries = retries or BRIEF_RETRIES
            self._write_retries = retries or (BRIEF_RETRIES if path is None else NO_RETRIES)
            self._folder: Folder = _object_folder(uri) if path is None else LocalFolder(path)
        except (OSError, ValueError) as error:
            problem = _line(error, uri)
            raise StoreError(f"cannot use {self.shown_uri} as a folder: {problem}") from None
        # workers run in other folders: a local path has to stay right there
        self.uri = uri if path is None else path
        self.is_local = path is not None

    def write(self, path: str, data: bytes | memoryview) -> None:
        """Write a file as a whole; when the call returns, the file is on the disk."""
        self._try("write", path, lambda: self._folder.write(path, data))

    def write_from(self, path: str, source: BinaryIO) -> None:
        """Write the rest of `source`, which can seek."""
        start = source.tell()

        def write() -> None:
            source.seek(start)
            self._folder.write_from(path, source)

        self._try("write", path, write)

    def write_new(self, path: str, data: bytes) -> bool:
        """Write a new file; return False if it exists. Of several writers, one wins.

        Raises `StoreError` too if an object store could not promise that.
        """
        return self.write_new_from(path, BytesIO(data))

    def write_new_from(self, path: str, source: BinaryIO) -> bool:
        """Write a new file from `source`, like `write_new`.

        Over 4 GiB in an object store, the last of several writers at once wins, and all get True.
        """
        start, num_tries = source.tell(), 0

        def write() -> bool:
            nonlocal num_tries
            num_tries += 1
            source.seek(start)
            if self._folder.write_new_from(path, source):
                return True
            source.seek(start)
            # an earlier try may have written the file without an answer
            return num_tries > 1 and self._is_there(path, source)

        return self._try("write", path, write)

    def _is_there(self, path: str, source: BinaryIO) -> bool:
        found = self._folder.open(path)
        if found is None:
            return False
        with closing(found):
            while piece := found.read(COPY_BYTES):
                if source.read(len(piece)) != piece:
                    return False
        return not source.read(1)

    def read(self, path: str) -> bytes | None:
        """Return a file's bytes, or None if the file does not exist."""
        return self._try("read", path, lambda: self._folder.read(path))

    def read_part(self, path: str, start: int, length: int) -> bytes | None:
        """Return `length` bytes from `start` on, fewer at the end, or None if there is no such file."""
        return self._try("read", path, lambda: self._folder.read_part(path, start, length))

    @contextmanager
    def opened(self, path: str) -> Iterator[BinaryIO | None]:
        """Yield an open, seekable file of a local folder for the block, or None if the file does not exist."""
        source = self._try("read", path, lambda: self._folder.open(path))
        if source is None:
            yield None
            return
        with BufferedReader(_SeekableFile(cast(LocalReader, source), partial(self._try, "read", path))) as file:
            yield file

    def copy_to(self, path: str, target: IO[bytes]) -> bool:
        """Write a file's bytes to `target` in pieces; return False if the file does not exist.

        Errors of `target` pass unchanged. Raises `StoreError` too if the object is replaced meanwhile.
        """
        pieces = self.pieces(path)
        if pieces is None:
            return False
        for piece in pieces:
            target.write(piece)
        return True

    def pieces(self, path: str, start: int = 0, length: int = sys.maxsize) -> Generator[bytes, None, None] | None:
        """Return a file's bytes in pieces, or None if it does not exist. Raises `StoreError` if it is replaced."""
        source = self._try("read", path, lambda: self._folder.open(path))
        return None if source is None else self._read_on(path, source, start, length)

    def _read_on(self, path: str, source: ReadableFile, start: int, num_left: int) -> Generator[bytes, None, None]:
        with closing(source):
            if start:
                self._try("read", path, lambda: source.seek(start))
            while piece := self._try("read", path, partial(source.read, min(COPY_BYTES, num_left))):
                num_left -= len(piece)
                yield piece

    def exists(self, path: str) -> bool:
        """Return whether there is a file (not a folder) at `path`."""
        return self._try("look up", path, lambda: self._folder.exists(path))

    def list(self, folder: str) -> builtins.list[str]:
        """Return the sorted names in a folder ('' is the store's own), or [] if the folder is absent."""
        names = self._try("list", folder, lambda: self._folder.list(folder), is_root_meant=True)
        return sorted(name for name in names if name[0] != ".")

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return the names in a folder with each file's bytes, or None for a subfolder."""
        sizes = self._try("list", folder, lambda: self._folder.sizes(folder))
        return {name: sizes[name] for name in sorted(sizes) if name[0] != "."}

    def move(self, path: str, target: str) -> bool:
        """Rename a file or folder; return False if it does not exist. `target` must be free."""
        _check(target)
        return self._try("move", path, lambda: self._folder.move(path, target))

    def delete_leftovers(self, folder: str, min_age_seconds: float = 0) -> None:
        """Delete unfinished files of killed writers ('' is the store's own folder).

        A live writer's write fails if its file is older than `min_age_seconds`.
        """
        self._try("clean", folder, lambda: self._folder.delete_leftovers(folder, min_age_seconds), is_root_meant=True)

    def delete(self, path: str) -> None:
        self._try("delete", path, lambda: self._folder.delete(path))

    def delete_folder(self, folder: str) -> None:
        self._try("delete", folder, lambda: self._folder.delete_folder(folder))

    def _try(self, action: str, path: str, call: Callable[[], Result], is_root_meant: bool = False) -> Result:
        """Retry `call` as allowed; turn an error of the storage into one line for the user."""
        if not (is_root_meant and path == ""):
            _check(path)
        retries = self._retries if action in READING else self._write_retries
        try:
            return retries.call(call)
        except OSError as error:
            where = f"{path!a} in {self.shown_uri}" if path else self.shown_uri
            tried = f", tried for {retries.seconds:g} s" if retries.seconds and is_transient(error) else ""
            told = f"{_line(error, self.uri)}{tried}; {self._advice(error)}"
            raise StoreError(f"cannot {action} {where}: {told}") from None

    def _advice(self, error: OSError) -> str:
        if error.errno in DISK_FULL:
            return "the disk is full: make room there, or use another folder"
        if self.is_local:
            return "check that the folder can be read and written, or use another one"
        if error.errno == errno.ENOTSUP:
            return "use a store that knows conditional writes (Amazon S3, GCS, Azure, MinIO, Ceph), or a shared folder"
        return "check the bucket, the endpoint and the credentials, or use another folder"


def _object_folder(uri: str) -> Folder:
    # its library takes time to import, and need not be there if all folders are local
    from swiftbatch.jobs.storage.object_store import ObjectFolder

    return ObjectFolder(uri)


def _line(error: Exception, uri: str) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(hidden_credentials(text, uri).split())


def _check(path: str) -> None:
    if "\0" in path or any(not name or name.startswith(".") for name in path.split("/")):
        raise StoreError(f"refused the path {path!a}: expected names joined by '/', none empty or starting with '.'")


# Temporary files: short ones in memory, longer ones on this machine's disk.


MEMORY_BYTES = 32 * 2**20


@contextmanager
def spool() -> Iterator[BinaryIO]:
    """Yield an empty file for the block. Raises `StoreError` without room."""
    with told_of_room(), new_spool() as file:
        yield file


def new_spool() -> BinaryIO:
    """Return an empty file; the caller must write it under `told_of_room` and close it."""
    return cast(BinaryIO, SpooledTemporaryFile(MEMORY_BYTES))


@contextmanager
def told_of_room() -> Iterator[None]:
    """Raise errors of a temporary file as `StoreError`."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write a temporary file: {error}; make room there") from None


@contextmanager
def at_hand(store: Store, path: str) -> Iterator[BinaryIO | None]:
    """Yield a store's file so that it can seek, or None if the file does not exist. Raises `StoreError`."""
    if store.is_local:
        with store.opened(path) as found:
            yield found
        return
    with spool() as copy:
        is_there = store.copy_to(path, copy)
        copy.seek(0)
        yield copy if is_there else None
