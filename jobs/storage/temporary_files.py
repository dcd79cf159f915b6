"""Files for what is put together or looked into: in memory while they are short, then on this machine's disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, cast

from swiftbatch.jobs.storage.store import Store, StoreError

MEMORY_BYTES = 32 * 2**20


@contextmanager
def spool() -> Iterator[BinaryIO]:
    """An empty file that goes with the block. Raises `StoreError` where there is no room for it."""
    with told_of_room(), new_spool() as file:
        yield file


def new_spool() -> BinaryIO:
    """An empty file that somebody is to close; to be written under `told_of_room`."""
    return cast(BinaryIO, SpooledTemporaryFile(MEMORY_BYTES))


@contextmanager
def told_of_room() -> Iterator[None]:
    """Have an error of a temporary file told as one. Raises `StoreError`."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write a temporary file: {error}; make room there") from None


@contextmanager
def at_hand(store: Store, path: str) -> Iterator[BinaryIO | None]:
    """A file of a store that can seek, which goes with the block; None where there is none. Raises `StoreError`."""
    if store.is_local:
        with store.opened(path) as found:
            yield found
        return
    with spool() as copy:
        is_there = store.copy_to(path, copy)
        copy.seek(0)
        yield copy if is_there else None
