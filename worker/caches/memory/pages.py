"""Counts the pages that caches take of a worker's memory while they grow. Without torch: the driver plans with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from swiftbatch.worker.caches.room import MAX_TREE_NODES, HeldPositions

PAGE = 64  # positions; a CPU's memory is taken in less
GPU_PAGE = 256  # positions of a GPU's: of many short jobs each wastes half of one, and one look-up is a block's anyway
HORIZON = 2048  # tokens that a job has room for when it begins: to leave and to come back costs far less than these
ROOM_BEHIND = MAX_TREE_NODES + 1  # positions that a step may write behind the committed ones


class Growth(NamedTuple):
    """One job's positions: those that it has, those expected at its end, and first ones that others have as well."""

    now: int
    end: int
    num_shared: int = 0

    @property
    def left(self) -> int:
        return max(0, self.end - self.now)


class PoolSize(NamedTuple):
    """The pool of pages that a GPU's caches lie in."""

    num_pages: int
    page: int  # positions of a page


def pages_of(num_positions: int, page: int | None = None) -> int:
    """The pages of a cache with so many committed positions, and room for a step behind them.

    `page` is the number of a page's positions, None on a CPU.
    """
    return -(-(num_positions + ROOM_BEHIND) // (page or PAGE))


def most_pages(jobs: Iterable[Growth], page: int | None = None, held: HeldPositions | None = None) -> int:
    """The most pages that jobs take within the horizon if they grow alike, and each leaves at its expected end.

    That time is one of the ends, or the horizon: a job's pages are free again when it has left, and until then all
    others grow. What lies behind the horizon is left open: by then some have ended, or the youngest makes room.
    Caches hold what `held` says of their positions, without it all.
    """
    page = page or PAGE
    most, now, by_end = 0, 0, sorted(jobs, key=lambda job: job.left, reverse=True)
    for count, job in enumerate(by_end, start=1):
        now, time = now + job.now, min(job.left, HORIZON)
        grown = (
            now + count * time
            if held is None
            else sum(held.of(each.now + time, each.num_shared) for each in by_end[:count])
        )
        most = max(most, grown + count * (ROOM_BEHIND + page - 1))
    return -(-most // page)
