"""Leases of an arena's slots and pages, which are free again once nobody holds them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence

from swiftbatch.worker.kv.cache_rows import NO_PAGE
from swiftbatch.worker.kv.kv_capacity import KVRoomError, PagesError


class PagePool:
    """Free pages, and the number of holders of each other page; thread-safe."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(reversed(range(num_pages)))
        self._num_holders = [0] * num_pages
        # must be reentrant: taking pages may trigger garbage collection of a cache, which gives its pages back
        self._lock = threading.RLock()

    def take(self, count: int) -> list[int]:
        """Return `count` pages for a sequence. Raises PagesError if fewer are free."""
        if count > len(self._free):
            gc.collect()  # frees caches in reference cycles, for example of tracebacks
        with self._lock:
            if count > len(self._free):
                raise PagesError(
                    f"no page for a job's next positions: all {len(self._num_holders):,} of this worker's GPU are "
                    "taken; use fewer --slots, or more --workers"
                )
            pages = [self._free.pop() for _ in range(count)]
            for page in pages:
                self._num_holders[page] = 1
            return pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_shared(self, page: int) -> bool:
        return self._num_holders[page] > 1

    def share(self, pages: Sequence[int]) -> None:
        with self._lock:
            for page in pages:
                self._num_holders[page] += 1

    def give_back(self, pages: list[int], num_kept: int = 0) -> None:
        """Remove all but the first `num_kept` pages from a sequence's list `pages`, and free them."""
        with self._lock:
            for page in pages[num_kept:]:
                if page == NO_PAGE:
                    continue
                self._num_holders[page] -= 1
                if not self._num_holders[page]:
                    self._free.append(page)
            del pages[num_kept:]


class SlotLease:
    """Right to a slot, which is free again once this object is gone."""

    def __init__(self, slot: int) -> None:
        self.slot = slot


class SlotLeases:
    """Leases of an arena's slots."""

    def __init__(self, num_slots: int) -> None:
        self.free = list(reversed(range(num_slots)))

    def take(self, problem: str) -> SlotLease:
        """Return a lease. Raises KVRoomError with the `problem` if no slot is free."""
        if not self.free:
            gc.collect()  # frees caches in reference cycles, for example of tracebacks
        if not self.free:
            raise KVRoomError(problem)
        lease = SlotLease(self.free.pop())
        weakref.finalize(lease, self.free.append, lease.slot)
        return lease
