"""Reads bytes of a file into memory of this process and hashes them meanwhile."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from io import RawIOBase


class Hashing:
    """A SHA-256 that is computed in another thread, one piece at a time."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._sha256 = hashlib.sha256()
        self._thread = thread
        self._pending: Future[None] | None = None

    def take(self, data: bytes | memoryview) -> None:
        """Hash the next bytes, once those before are done."""
        self._finish()
        self._pending = self._thread.submit(self._sha256.update, data)

    def digest(self) -> str:
        self._finish()
        return self._sha256.hexdigest()

    def _finish(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None


def exactly(stream: RawIOBase, size: int) -> bytes:
    """So many bytes. Raises ValueError where the file ends before."""
    data = bytearray(size)
    fill(stream, memoryview(data))
    return bytes(data)


def fill(stream: RawIOBase, room: memoryview) -> None:
    """Read until the room is full. Raises ValueError where the file ends before."""
    while room:
        if not (num_read := stream.readinto(room)):
            raise ValueError(f"found its end, expected {len(room):,} bytes more")
        room = room[num_read:]
