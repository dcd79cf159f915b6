"""Jobs that wait on a worker, and the room of its caches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftbatch.worker.kernels.kernel_sizes import ROW_CHOICES
from swiftbatch.worker.kv.kv_capacity import (
    PAGE,
    ROOM_BEHIND,
    Growth,
    HeldPositions,
    PoolSize,
    fit,
    pages_of,
)
from swiftbatch.worker.session.work_messages import Assignment, Orders

MOST_READ = 5 * ROW_CHOICES[-1]  # copied twice, these are read in up to three forwards

if TYPE_CHECKING:  # sessions without a model import this module without torch
    from swiftbatch.worker.forward.target_model import TargetModel
    from swiftbatch.worker.kv.paged_arena import KVArena
    from swiftbatch.worker.session.running_job import RunningJob

    Pool = tuple[int | None, Callable[[Iterable[RunningJob]], int]]


@dataclass
class CacheRoom:
    """Memory of a worker for its jobs' caches."""

    pool: PoolSize | None = None  # None: no limit
    num_beside: int = 0  # recurrent states take as much as so many positions
    held: HeldPositions | None = None  # None: a job's cache keeps all its positions
    arena: KVArena | None = None  # None: caches share no pages

    @classmethod
    def of(cls, target: TargetModel, num_unwritten: int | None) -> CacheRoom:
        """Return the room for a target's caches, for checkpoints that lag by `num_unwritten` positions."""
        pool, held = target.pool_size, target.held_positions(num_unwritten)
        return cls(pool, target.num_state_positions(), held, None if pool is None else target.forwards.arena)

    @property
    def num_pages(self) -> int | None:
        return None if self.pool is None else self.pool.num_pages

    @property
    def _page(self) -> int:
        return PAGE if self.pool is None else self.pool.page

    def follow(self, orders: Orders) -> None:
        """Set the number of pages from the orders on a CPU; a GPU's arena fixes its own number."""
        if self.arena is None:
            self.pool = None if orders.num_pages is None else PoolSize(orders.num_pages, PAGE)

    def can_fit(self, jobs: Collection[RunningJob]) -> bool:
        """Return whether jobs have room for another step; a single job always has room."""
        (most, num_taken), _ = self._pools(jobs)
        return self._fits_windows(jobs) and (most is None or len(jobs) < 2 or num_taken(jobs) <= most)

    def without_room(self, jobs: Collection[RunningJob]) -> list[RunningJob]:
        """Return the jobs that must leave before the next step: the youngest, as few as possible, never the eldest.

        Age counts from a job's first attempt on any worker, so two jobs cannot evict each other in turns.
        """
        if not self._fits_windows(jobs):
            for job in jobs:  # frees positions kept for other sequences
                job.cache.release()
        by_age = sorted(jobs, key=lambda job: job.assignment.seniority)
        leaving: list[RunningJob] = []
        for most, num_taken in self._pools(jobs):
            num_used = 0 if most is None else num_taken(by_age)
            while most is not None and num_used > most and len(by_age) > 1:
                leaving.append(by_age.pop())
                num_used -= num_taken(leaving[-1:])
        return leaving

    def num_taken(self, jobs: Iterable[RunningJob]) -> int:
        return sum(pages_of(self._held(job) + self.num_beside, self._page) for job in jobs)

    def has_room(self, jobs: Collection[RunningJob], assignment: Assignment) -> bool:
        """Return whether a job is expected to fit together with the running jobs for a while."""
        if self.pool is None or not jobs:
            return True
        growths = [self._growth_of(job) for job in jobs]
        growths.append(self._growth(assignment.num_prompt_tokens, assignment.num_reported_tokens, assignment))
        return fit(growths, self.pool, self.held)

    def _pools(self, jobs: Collection[RunningJob]) -> tuple[Pool, Pool]:
        """Return the pool of pages and the pool of window pages, each with a function that counts what jobs need."""
        found = (self.num_pages, None) if self.arena is None else self.arena.num_pages_for(job.cache for job in jobs)
        return (found[0], self.num_taken), (found[1], self._num_in_windows)

    def _fits_windows(self, jobs: Collection[RunningJob]) -> bool:
        _, (most, num_taken) = self._pools(jobs)
        return most is None or num_taken(jobs) <= most

    def _num_in_windows(self, jobs: Iterable[RunningJob]) -> int:
        """Count the window pages that jobs are expected to keep, or need for a step."""
        assert self.pool is not None
        assert self.pool.windows is not None
        held, num_pages = self.pool.windows.held, 0
        for job in jobs:
            num_tokens = len(job.sequence)
            end = min(num_tokens + ROOM_BEHIND, job.cache.length + MOST_READ)
            num_pages += max(pages_of(held.of(num_tokens), self._page), job.cache.num_window_pages_for(end))
        return num_pages

    def _held(self, job: RunningJob) -> int:
        """Return how many unforgotten positions take the same memory; a shared prompt is kept in full."""
        num_positions = len(job.sequence)
        return num_positions if self.held is None else self.held.of(num_positions, job.assignment.num_shared_tokens)

    def _growth_of(self, job: RunningJob) -> Growth:
        sequence = job.sequence
        return self._growth(sequence.num_prompt_tokens, sequence.num_generated_tokens, job.assignment)

    def _growth(self, num_prompt_tokens: int, num_tokens: int, assignment: Assignment) -> Growth:
        num_before, num_expected = num_prompt_tokens + self.num_beside, assignment.num_expected_tokens
        end = num_before + max(num_tokens, num_expected)
        return Growth(num_before + num_tokens, end, assignment.num_shared_tokens)


class Backlog:
    """Jobs of a worker that have not begun, in the order that the driver chose."""

    def __init__(self) -> None:
        self._waiting: dict[str, Assignment] = {}
        self._num_slots: int | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def follow(self, orders: Orders) -> list[str]:
        """Add new jobs and drop cancelled ones; return the recalled jobs, which have not begun."""
        self._num_slots = orders.num_slots
        for job_id in orders.cancelled:
            self._waiting.pop(job_id, None)
        recalled = [job_id for job_id in orders.recalled if self._waiting.pop(job_id, None)]
        self._waiting |= {assignment.job_id: assignment for assignment in orders.reserve}
        return recalled

    def keep_to(self, num_jobs: int) -> None:
        """Limit the number of running jobs until the next orders."""
        self._num_slots = num_jobs

    def next(self, jobs: Collection[RunningJob], room: CacheRoom) -> Assignment | None:
        """Take the first job with room; a shorter one may go before a long one."""
        if self._num_slots is not None and len(jobs) >= max(1, self._num_slots):
            return None
        found = next((each for each in self._waiting.values() if room.has_room(jobs, each)), None)
        return self._waiting.pop(found.job_id) if found else None

    def give_up(self) -> list[str]:
        waiting, self._waiting = list(self._waiting), {}
        return waiting
