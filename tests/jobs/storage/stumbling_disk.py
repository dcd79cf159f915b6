"""A network disk whose handles go stale: one of them fails at some read, and at every later one."""

from __future__ import annotations

import errno
import itertools
from io import FileIO
from typing import Any

import pytest

from swiftbatch.jobs.storage import local_folder, retries


def stumble(monkeypatch: pytest.MonkeyPatch, at_read: int, every: int | None = None) -> list[int]:
    """Have one read of all fail with its handle, counted from 0, or each that is a multiple of `every` behind it.

    Returns the numbers of those that failed, which grow.
    """
    numbers, failed = itertools.count(), list[int]()

    class Handle(FileIO):
        is_stale = False

        def read(self, size: int | None = -1, /) -> Any:
            number = next(numbers)
            behind = number - at_read
            if not self.is_stale and (behind == 0 or (every is not None and behind > 0 and behind % every == 0)):
                self.is_stale = True
                failed.append(number)
            if self.is_stale:
                raise OSError((errno.ESTALE, errno.EIO)[number % 2], "Stale file handle")
            return super().read(size)

    opener = local_folder._open_file
    monkeypatch.setattr(local_folder, "_opened", lambda path: Handle(path, "rb", opener=opener))
    monkeypatch.setattr(retries, "STORE_BACKOFF", lambda state: 0.0)
    return failed
