"""Reads files that may be damaged: what is not whole is named in the log, once, and skipped."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from jobs.checkpoints.token_log import DamagedFileError
from jobs.storage.store import Store

Content = TypeVar("Content")
Decode: TypeAlias = Callable[[bytes], Content]

logger = logging.getLogger(__name__)


def digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


class CheckedFiles:
    """Files of a store, decoded. The `decode` functions raise `DamagedFileError`; methods raise `StoreError` only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._named: set[tuple[str, str]] = set()

    def read_verified(self, path: str, size: int, sha256: str, decode: Decode[Content]) -> Content | None:
        """As `decoded`, for a file that should be there, whose size in bytes and checksum are known."""

        def verified(data: bytes) -> Content:
            if len(data) != size:
                raise DamagedFileError(f"found {len(data)} bytes, expected {size}")
            if digest(data) != sha256:
                raise DamagedFileError("found content that does not match its checksum")
            return decode(data)

        return self.decoded(path, self._store.read(path), verified)

    def decoded(self, path: str, data: bytes | None, decode: Decode[Content]) -> Content | None:
        """What is in `data`, which was read from `path`; None where that is absent or damaged."""
        try:
            if data is None:
                raise DamagedFileError("found no file")
            return decode(data)
        except DamagedFileError as error:
            self._name(path, str(error))
            return None

    def _name(self, path: str, problem: str) -> None:
        if (path, problem) not in self._named:
            self._named.add((path, problem))
            where = self._store.shown_uri
            logger.warning("skipped %s in %s: %s; the job goes on from what is left", path, where, problem)
