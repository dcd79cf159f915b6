"""Decides how many jobs a worker takes: as many as its memory may be expected to hold for a while, up to a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swiftbatch.worker.caches.memory.page_counts import PAGE, ROOM_BEHIND, Growth, has_window_pages, most_pages
from swiftbatch.worker.kernels.kernel_sizes import MOST_SLOTS

if TYPE_CHECKING:
    from swiftbatch.scheduler.driver.worker_fleet import Fleet, Worker

MOST_RESERVED = 1000  # jobs: more would be a second's work for nobody, and orders would be large
MEMORY_SHARE = 0.8  # of what is free, for caches; drafts and checkpoints on their way need some, too


class Slots:
    """Says whether a worker takes one more job beside those that it has.

    It looks ahead for a while only, and may be wrong: a worker whose memory runs out hands its youngest jobs back. Then
    it gets no more until one of those that it kept has left, so it hands jobs back no more often than jobs end.
    """

    def __init__(self, num_slots: int | None, fleet: Fleet, most_positions: int | None = None) -> None:
        """The user wants at most `num_slots`, and on a CPU `most_positions`; None to leave it to the worker."""
        self._num_slots, self._most_positions = num_slots, most_positions
        self._fleet = fleet

    def most_anywhere(self) -> int:
        """The most jobs that run on any worker at a time; before one has started, those that the user wants.

        One always may, also where those that were left when memory ran out have all ended.
        """
        started = [self.most_jobs(worker) for worker in self._fleet.workers if worker.info]
        return max(1, max(started, default=self._num_slots or MOST_SLOTS))

    def is_full(self, worker: Worker, num_held: int) -> bool:
        """Tell whether a worker with so many jobs takes no other, however short it is."""
        return 0 < num_held >= self.most_jobs(worker)

    def most_jobs(self, worker: Worker) -> int:
        """The most jobs that run on a worker at a time, however short they are; one always may."""
        of_gpu = worker.info.num_slots if worker.info else None  # made when it started
        wanted = MOST_SLOTS if self._num_slots is None and of_gpu is None else self._num_slots
        return min(bound for bound in (wanted, of_gpu, worker.num_fitting) if bound is not None)

    def num_to_reserve(self, held: Sequence[Growth], mean_length: float, seconds: float) -> int:
        """The jobs that a worker with others begins within so many seconds, one where each of those ends.

        A job that follows another is believed to be about as long as those that run, `mean_length` tokens.
        """
        seconds_per_token = self._fleet.pace.seconds_per_token(len(held))
        if not held or seconds_per_token == 0.0:
            return 0
        num_tokens, mean_length = seconds / seconds_per_token, max(1.0, mean_length)
        lefts = [max(1, job.left) for job in held]
        ends = (num_tokens / left if left > num_tokens else 1 + (num_tokens - left) / mean_length for left in lefts)
        return min(MOST_RESERVED, round(sum(ends)))

    def has_room(self, worker: Worker, held: list[Growth], job: Growth) -> bool:
        """Tell whether a job would fit beside those that a worker has, for a while; alone it always does."""
        num_pages = self.num_pages(worker)
        if not held or worker.info is None or num_pages is None:
            return not held or num_pages is None
        beside, pool = worker.info.num_state_positions, worker.info.pool_size
        page = PAGE if pool is None else pool.page
        if pool is not None and not has_window_pages((*held, job), page, pool.windows):
            return False
        if _at_their_ends(held, job, beside, page) <= num_pages * page:
            return True  # as most often; to look when each ends is dear
        jobs = [each._replace(now=each.now + beside, end=each.end + beside) for each in (*held, job)]
        return most_pages(jobs, page, worker.info.held_positions) <= num_pages

    def num_pages(self, worker: Worker) -> int | None:
        """The worker's share of its machine's memory; who is still to start may come to the same machine.

        A GPU's pool is its own. None where a GPU was shared out in slots.
        """
        if worker.info is None:
            return 0
        if worker.info.pool_size is not None:
            return worker.info.pool_size.num_pages
        if worker.info.num_slots is not None:
            return None
        num_sharing = self._fleet.num_sharing(worker.info.node_id)
        share = int(MEMORY_SHARE * worker.info.num_free_positions / num_sharing)
        return (share if self._most_positions is None else min(share, self._most_positions)) // PAGE


def _at_their_ends(held: Sequence[Growth], job: Growth, beside: int, page: int) -> int:
    """The most positions that jobs could take if all were at their ends at once."""
    num_jobs = len(held) + 1
    return job.end + sum(each.end for each in held) + num_jobs * (beside + ROOM_BEHIND + page - 1)
