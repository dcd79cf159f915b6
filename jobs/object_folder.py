"""The storage behind a `Store` on an object store, through `pyarrow.fs`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any, BinaryIO, Self

from jobs.folders import COPY_BYTES


class ObjectFolder:
    """All objects under one prefix. A write is one PUT, which readers see as a whole; there is no rename."""

    def __init__(self, filesystem: Any, root: str) -> None:
        """`filesystem` is a `pyarrow.fs.FileSystem`, `root` the bucket and prefix in it."""
        self._filesystem = filesystem
        self._root = root.rstrip("/")

    @classmethod
    def open(cls, uri: str) -> Self:
        """The folder of an `s3://` or `gs://` URI. Raises `ValueError` or `OSError`."""
        # pyarrow takes a noticeable part of a second to import, and a local run's status needs none of it
        from pyarrow import fs

        if uri.startswith("s3://"):
            # without it pyarrow starts a multipart upload even for a few bytes: three requests for one PUT
            uri += f"{'&' if '?' in uri else '?'}allow_delayed_open=true"
        with _as_os_error():
            return cls(*fs.FileSystem.from_uri(uri))

    def write(self, path: str, source: BinaryIO) -> None:
        # leaving the block on an exception would publish the part so far: `source` is memory or a local file
        with _as_os_error(), self._filesystem.open_output_stream(self._full(path)) as stream:
            shutil.copyfileobj(source, stream, COPY_BYTES)

    def write_new(self, path: str, data: bytes) -> bool:
        if self.exists(path):
            return False
        self.write(path, BytesIO(data))
        return True

    def read(self, path: str) -> bytes | None:
        try:
            with _as_os_error(), self._filesystem.open_input_stream(self._full(path)) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    def exists(self, path: str) -> bool:
        with _as_os_error():
            return bool(self._filesystem.get_file_info(self._full(path)).is_file)

    def list(self, folder: str) -> list[str]:
        from pyarrow import fs

        with _as_os_error():
            selector = fs.FileSelector(self._full(folder), allow_not_found=True)
            return [info.base_name for info in self._filesystem.get_file_info(selector)]

    def delete(self, path: str) -> None:
        try:
            with _as_os_error():
                self._filesystem.delete_file(self._full(path))
        except FileNotFoundError:
            pass

    def delete_folder(self, folder: str) -> None:
        try:
            with _as_os_error():
                self._filesystem.delete_dir(self._full(folder))
        except FileNotFoundError:
            pass

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


@contextmanager
def _as_os_error() -> Iterator[None]:
    """pyarrow raises `OSError` for most failures of the storage, and its own kinds for some."""
    from pyarrow import ArrowException

    try:
        yield
    except ArrowException as error:
        raise OSError(str(error)) from None
