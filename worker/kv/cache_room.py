"""A worker's room for the caches of its jobs: what they take now, and what they will take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swiftbatch.worker.kernels.kernel_sizes import ROW_CHOICES
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import PAGE, ROOM_BEHIND, Growth, HeldPositions, PoolSize, fit, pages_of
from swiftbatch.worker.kv.slot_arena import KVArena

MOST_READ = 5 * ROW_CHOICES[-1]  # copied twice, these are read in up to three forwards


class CachedJob(NamedTuple):
    """A running job's cache, and how far it is expected to grow."""

    cache: FullKVCache
    growth: Growth


@dataclass
class CacheRoom:
    """Memory of a worker for its jobs' caches."""

    pool: PoolSize | None = None  # None: no limit
    num_beside: int = 0  # recurrent states take as much as so many positions
    held: HeldPositions | None = None  # None: a job's cache keeps all its positions
    arena: KVArena | None = None  # None: caches share no pages

    @property
    def num_pages(self) -> int | None:
        return None if self.pool is None else self.pool.num_pages

    def limit(self, num_pages: int | None) -> None:
        """Set the number of pages on a CPU; a GPU's arena fixes its own number."""
        if self.arena is None:
            self.pool = None if num_pages is None else PoolSize(num_pages, PAGE)

    def can_fit(self, jobs: Collection[CachedJob]) -> bool:
        """Return whether jobs have room for another step; only window pages can lack for a single job."""
        pools = self._pools(jobs)
        return all(num_taken(jobs) <= most for most, num_taken in (pools if len(jobs) > 1 else pools[1:]))

    def num_without_room(self, jobs: Sequence[CachedJob]) -> int:
        """Return how many of the first jobs must leave before the next step: as few as possible, never the last."""
        pools, num_leaving = self._pools(jobs), 0
        if any(num_taken(jobs) > most for most, num_taken in pools[1:]):
            for job in jobs:  # frees positions kept for other sequences
                job.cache.release()
            pools = self._pools(jobs)
        for most, num_taken in pools:
            while num_leaving < len(jobs) - 1 and num_taken(jobs[num_leaving:]) > most:
                num_leaving += 1
        return num_leaving

    def num_taken(self, jobs: Iterable[CachedJob]) -> int:
        """Count the pages that jobs take for now; a shared prompt is kept in full."""
        page, held = PAGE if self.pool is None else self.pool.page, self.held
        kept = (now if held is None else held.of(now, num_shared) for _, (now, _, num_shared) in jobs)
        return sum(pages_of(num_positions + self.num_beside, page) for num_positions in kept)

    def has_room(self, jobs: Collection[CachedJob], growth: Growth) -> bool:
        """Return whether one more job is expected to fit together with the running jobs for a while."""
        if self.pool is None or not jobs:
            return True
        return fit([*(job.growth for job in jobs), growth], self.pool, self.held, self.num_beside)

    def _pools(self, jobs: Iterable[CachedJob]) -> list[tuple[int, Callable[[Iterable[CachedJob]], int]]]:
        """Return the pages for jobs in each pool, with a function that counts what jobs need of them."""
        if self.pool is None or self.arena is None:
            return [] if self.pool is None else [(self.pool.num_pages, self.num_taken)]
        pools = zip((self.arena, self.arena.windowed), (self.num_taken, self._num_in_windows), strict=True)
        return [
            (slots.num_free_pages + sum(cache.stores[number].num_pages for cache, _ in jobs), num_taken)
            for number, (slots, num_taken) in enumerate(pools)
            if slots is not None
        ]

    def _num_in_windows(self, jobs: Iterable[CachedJob]) -> int:
        """Count the window pages that jobs are expected to keep, or need for a step."""
        assert self.pool is not None
        assert self.pool.windows is not None
        held, num_pages = self.pool.windows.held, 0
        for cache, (now, _, _) in jobs:
            end = min(now + ROOM_BEHIND, cache.length + MOST_READ)
            num_for_step = cache.stores[1].num_pages_for(end, cache.length)
            num_pages += max(pages_of(held.of(now), self.pool.page), num_for_step)
        return num_pages
