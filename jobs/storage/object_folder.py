"""The storage behind a `Store` on an object store, through `pyarrow.fs`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from io import SEEK_END, UnsupportedOperation
from mmap import ACCESS_READ, mmap
from threading import current_thread, main_thread
from typing import Any, BinaryIO

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from swiftbatch.jobs.storage.local_folder import ReplacedError
from swiftbatch.jobs.storage.object_stores import Place, as_os_error


class ObjectReader:
    """Reads one object in one version, though others may replace it meanwhile.

    Every read is a request of its own, which gets what is there then: the end is checked to be the beginning's.
    """

    def __init__(self, filesystem: Any, full_path: str) -> None:
        """Raises `FileNotFoundError` when there is no such object."""
        self._filesystem = filesystem
        self._full_path = full_path
        with as_os_error():
            self._file = filesystem.open_input_file(full_path)
            self._version = _version(self._file)

    def read(self, size: int | None = None) -> bytes:
        """The next `size` bytes, or the rest; b"" at the end. After an error the same bytes can be asked for again.

        Raises `ReplacedError`, with the last bytes at the latest.
        """
        try:
            with as_os_error():
                data = bytes(self._file.read(size))
        except OSError:
            self._check()
            raise
        if size is None or not data:
            self._check()
        return data

    def seek(self, position: int) -> None:
        with as_os_error():
            self._file.seek(position)

    def _check(self) -> None:
        try:
            with as_os_error(), self._filesystem.open_input_file(self._full_path) as now:
                is_same = _version(now) == self._version
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise ReplacedError

    def close(self) -> None:
        self._file.close()


def _version(file: Any) -> tuple[int, dict[str, bytes]]:
    return file.size(), file.metadata()


SINGLE_BYTES = 5 * 2**20  # S3 allows no smaller part, so what is shorter goes up in one request
PIECE_BYTES = 20 * 2**20  # two of pyarrow's parts; it copies what it has not sent yet
READ_TRIES = Retrying(stop=stop_after_attempt(5), retry=retry_if_exception_type(ReplacedError), reraise=True)


class ObjectFolder:
    """All objects under one prefix. A write is one PUT or one multipart upload, so it needs no rename to be whole."""

    def __init__(self, place: Place) -> None:
        self._filesystem = place.filesystem
        self._multipart = place.multipart
        self._root = place.root.rstrip("/")

    def write(self, path: str, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        if current_thread() is not main_thread():
            self._put(path, view)
            return
        # an interrupt comes to the main thread alone; there it would close the stream and publish what is in it so far
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self._put, path, view).result()

    def write_from(self, path: str, source: BinaryIO) -> None:
        # nothing may fail between two pieces, so the source is not read there
        self.write(path, _rest_of(source))

    def write_new(self, path: str, data: bytes) -> bool:
        if self.exists(path):
            return False
        self.write(path, data)
        return True

    def write_new_from(self, path: str, source: BinaryIO) -> bool:
        if self.exists(path):
            return False
        self.write_from(path, source)
        return True

    def read(self, path: str) -> bytes | None:
        return READ_TRIES(self._read_once, path)

    def read_part(self, path: str, start: int, length: int) -> bytes | None:
        try:
            with as_os_error(), self._filesystem.open_input_file(self._full(path)) as file:
                return bytes(file.read_at(max(0, min(length, file.size() - start)), start))
        except FileNotFoundError:
            return None

    def open(self, path: str) -> ObjectReader | None:
        try:
            return ObjectReader(self._filesystem, self._full(path))
        except FileNotFoundError:
            return None

    def exists(self, path: str) -> bool:
        with as_os_error():
            return bool(self._filesystem.get_file_info(self._full(path)).is_file)

    def list(self, folder: str) -> list[str]:
        return [*self.sizes(folder)]

    def sizes(self, folder: str) -> dict[str, int | None]:
        from pyarrow import fs

        with as_os_error():
            selector = fs.FileSelector(self._full(folder), allow_not_found=True)
            infos = self._filesystem.get_file_info(selector)
            return {info.base_name: info.size if info.is_file else None for info in infos}

    def move(self, path: str, target: str) -> bool:
        data = self.read(path)
        if data is None:
            return False
        self.write(target, data)
        self.delete(path)
        return True

    def delete_leftovers(self, folder: str, min_age_seconds: float) -> None:
        pass  # a write has no other name before its own

    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError), as_os_error():
            self._filesystem.delete_file(self._full(path))

    def delete_folder(self, folder: str) -> None:
        with suppress(FileNotFoundError), as_os_error():
            self._filesystem.delete_dir(self._full(folder))

    def _read_once(self, path: str) -> bytes | None:
        source = self.open(path)
        if source is None:
            return None
        with closing(source):
            return source.read()

    def _put(self, path: str, data: memoryview) -> None:
        """Write an object. Leaving the block closes the stream, which publishes it, unless a part failed before."""
        filesystem = self._filesystem if data.nbytes < SINGLE_BYTES else self._multipart
        with as_os_error(), filesystem.open_output_stream(self._full(path)) as stream:
            for start in range(0, data.nbytes, PIECE_BYTES):
                if start:
                    stream.flush()  # waits until the pieces before are sent: no more than one is in memory twice
                stream.write(data[start : start + PIECE_BYTES])

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


def _rest_of(source: BinaryIO) -> bytes | memoryview:
    """The rest of a file, mapped into memory; anything else is read."""
    try:
        descriptor, start = source.fileno(), source.tell()
    except UnsupportedOperation:
        return source.read()
    if source.seek(0, SEEK_END) <= start:
        return b""
    return memoryview(mmap(descriptor, 0, access=ACCESS_READ))[start:]
