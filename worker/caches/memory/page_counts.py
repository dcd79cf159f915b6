"""Counts the pages that caches take of a worker's memory while they grow. Without torch: the driver plans with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from swiftbatch.worker.caches.cache_room import MAX_TREE_NODES, NUM_ASKED, HeldPositions
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, ROW_CHOICES
from swiftbatch.worker.model.layer_windows import Windows

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


class WindowPages(NamedTuple):
    """The pages of layers with a window, which have a pool of their own where caches forget."""

    num_pages: int
    held: HeldPositions  # that a job's pages are for


class PoolSize(NamedTuple):
    """The pool of pages that a GPU's caches lie in."""

    num_pages: int
    page: int = GPU_PAGE  # positions of a page
    windows: WindowPages | None = None  # beside it; None where all layers lie in the pool


def pages_of(num_positions: int, page: int | None = None) -> int:
    """The pages of a cache with so many committed positions, and room for a step behind them.

    `page` is the number of a page's positions, None on a CPU.
    """
    return -(-(num_positions + ROOM_BEHIND) // (page or PAGE))


def held_in_windows(windows: Windows, num_unwritten: int) -> HeldPositions | None:
    """Return the pages of layers with a window, if checkpoints lag by so much; None where no layer sees all.

    Beside what is asked for, kernels read all that the first row of a block sees, the first page may be lost in part,
    and a forward may read as many rows as it has.
    """
    sizes = [size for size in windows if size is not None]
    if not sizes or len(sizes) == len(windows):
        return None
    num_behind = ROW_CHOICES[-1] - ROOM_BEHIND
    return HeldPositions(max(sizes) + BLOCK + NUM_ASKED + GPU_PAGE + num_behind + num_unwritten, 0.0)


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


def has_window_pages(jobs: Collection[Growth], page: int, windows: WindowPages | None) -> bool:
    """Tell whether layers with a window have pages enough for jobs, as `most_pages` counts; so without such a pool."""
    if windows is None:
        return True
    own = [job._replace(num_shared=0) for job in jobs]  # what is held for others gives way
    at_their_ends = sum(windows.held.of(job.end) + ROOM_BEHIND + page - 1 for job in own)
    return at_their_ends <= windows.num_pages * page or most_pages(own, page, windows.held) <= windows.num_pages
