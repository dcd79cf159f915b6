"""Narrow, atomic file access inside one folder: on a local disk, or on an object store through `pyarrow.fs`."""

from __future__ import annotations

import builtins
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from jobs.folders import Folder, LocalFolder
from jobs.object_folder import ObjectFolder
from jobs.uris import hidden_credentials, local_path, shown_uri


class StoreError(RuntimeError):
    """A file of the run could not be read or written; the text is one line for the user, without credentials."""


class Store:
    """Files below one folder. A reader sees a file whole or not at all, however its writer ended.

    Paths are relative with '/' between names. A name that is empty or starts with '.' is refused, so '..' is too, and
    no path leads out of the folder. Every method raises `StoreError` when the storage fails or the path is refused.
    """

    def __init__(self, uri: str) -> None:
        """`uri` is a local path, `file://`, `s3://` or `gs://`; nothing is created yet."""
        self.shown_uri = shown_uri(uri)
        try:
            path = local_path(uri)
            self._folder: Folder = ObjectFolder.open(uri) if path is None else LocalFolder(path)
        except (OSError, ValueError) as error:
            problem = hidden_credentials(str(error), uri)
            raise StoreError(f"cannot use {self.shown_uri} as a folder: {problem}") from None
        # workers run in other folders: a local path has to stay right there
        self.uri = uri if path is None else path

    def write(self, path: str, data: bytes) -> None:
        """Put a file in place as a whole, over an older one if there is one; it is on the disk when this returns."""
        self.write_from(path, io.BytesIO(data))

    def write_from(self, path: str, source: BinaryIO) -> None:
        """As `write`, with the rest of `source` as the data: for files too long for memory."""
        with self._told("write", path):
            self._folder.write(_checked(path), source)

    def write_new(self, path: str, data: bytes) -> bool:
        """As `write`, but leave an existing file alone and return False. Two writers at once: one gets True.

        On an object store the test and the write are two steps, and the later of two writers at once wins.
        """
        with self._told("write", path):
            return self._folder.write_new(_checked(path), data)

    def read(self, path: str) -> bytes | None:
        """The bytes of a file; None when there is none."""
        with self._told("read", path):
            return self._folder.read(_checked(path))

    def exists(self, path: str) -> bool:
        """Whether there is a file (not a folder) at `path`."""
        with self._told("look up", path):
            return self._folder.exists(_checked(path))

    def list(self, folder: str) -> builtins.list[str]:
        """Sorted names of the files and folders in a folder ('' is the store's own), [] when it is absent."""
        with self._told("list", folder):
            return sorted(name for name in self._folder.list(_checked(folder) if folder else "") if name[0] != ".")

    def delete(self, path: str) -> None:
        """Remove a file; an absent file is fine."""
        with self._told("delete", path):
            self._folder.delete(_checked(path))

    def delete_folder(self, folder: str) -> None:
        """Remove a folder with all that is in it; an absent folder is fine."""
        with self._told("delete", folder):
            self._folder.delete_folder(_checked(folder))

    @contextmanager
    def _told(self, action: str, path: str) -> Iterator[None]:
        """Turn an error of the storage into one line for the user."""
        try:
            yield
        except OSError as error:
            problem = hidden_credentials(error.strerror or str(error), self.uri)
            line = " ".join(problem.split())
            where = f"{path!a} in {self.shown_uri}" if path else self.shown_uri
            hint = "check that the folder can be read and written and is not full, or use another one"
            raise StoreError(f"cannot {action} {where}: {line}; {hint}") from None


def _checked(path: str) -> str:
    if "\0" in path or any(not name or name.startswith(".") for name in path.split("/")):
        raise StoreError(f"refused the path {path!a}: expected names joined by '/', none empty or starting with '.'")
    return path
