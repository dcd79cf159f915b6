"""The contract of a folder that a `Store` keeps files in: on a disk, or in an object store."""

from __future__ import annotations

from typing import BinaryIO, Protocol


class ReadableFile(Protocol):
    """An open file that is read from its beginning to its end."""

    def read(self, size: int, /) -> bytes | None:
        """Return so many of the next bytes at most; none at the end."""

    def close(self) -> None:
        """Let the file go."""


class Folder(Protocol):
    """Files below one folder, each there as a whole or not at all. Paths are relative, and checked by the caller.

    Methods raise OSError, or what the storage's library raises, and are not tried again here.
    """

    def write(self, path: str, data: bytes | memoryview) -> None:
        """Put a file in place, over an older one if there is one."""

    def write_from(self, path: str, source: BinaryIO) -> None:
        """Do as `write` with the rest of an open file."""

    def write_new(self, path: str, data: bytes) -> bool:
        """Put a file in place where there is none; False where there is one. On a disk one of several writers wins."""

    def write_new_from(self, path: str, source: BinaryIO) -> bool:
        """Do as `write_new` with the rest of an open file."""

    def read(self, path: str) -> bytes | None:
        """Return a file's content; None where there is none."""

    def read_part(self, path: str, start: int, length: int) -> bytes | None:
        """Return so many bytes of a file from a place on, fewer at its end; None where there is none."""

    def open(self, path: str) -> ReadableFile | None:
        """Open a file to read; None where there is none."""

    def exists(self, path: str) -> bool:
        """Return whether there is a file of that path."""

    def list(self, folder: str) -> list[str]:
        """Return the names in a folder, in any order; none where there is no folder."""

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return the names in a folder with the bytes of each file; None for a folder."""

    def move(self, path: str, target: str) -> bool:
        """Move a file; False where there is none."""

    def delete_leftovers(self, folder: str, min_age_seconds: float) -> None:
        """Delete what writers that ended left behind so long ago."""

    def delete(self, path: str) -> None:
        """Delete a file, if there is one."""

    def delete_folder(self, folder: str) -> None:
        """Delete a folder with all that is in it, if there is one."""
