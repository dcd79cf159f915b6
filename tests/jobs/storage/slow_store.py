"""A store on a local disk whose writes wait at a gate, for tests of what happens meanwhile."""

from __future__ import annotations

import threading
from typing import Any

from swiftbatch.jobs.storage.store import Store, StoreError


class GatedStore(Store):
    """Each write takes one permit; `written` lists the paths in order. `failing` raises instead of writing."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.written: list[str] = []
        self.failing = False
        self.is_waiting = threading.Event()
        self._permits = threading.Semaphore(0)
        self._is_open = False

    def let_through(self, num_writes: int) -> None:
        """Let some more writes through; the writer then waits again."""
        self.is_waiting.clear()
        self._permits.release(num_writes)

    def open_gate(self) -> None:
        """Let all writes through from now on."""
        self._is_open = True
        self._permits.release()

    def write(self, path: str, data: Any) -> None:
        if not self._is_open:
            self.is_waiting.set()
            assert self._permits.acquire(timeout=60)
        if self.failing:
            raise StoreError(f"cannot write {path!r}: No space left on device; free some")
        super().write(path, data)
        self.written.append("/".join(path.split("/")[1:]))
