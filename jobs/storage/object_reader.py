"""Read one object in one version, though others may replace it meanwhile."""

from __future__ import annotations

import errno
from typing import Any

from swiftbatch.jobs.storage.object_stores import as_os_error


class ReplacedError(OSError):
    """The object is no longer the one that was opened."""

    def __init__(self) -> None:
        super().__init__(errno.ECANCELED, "it was replaced while it was read; try again")


class ObjectReader:
    """Every read is a request of its own, which gets what is there then: the end is checked to be the beginning's."""

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
