"""Layers with a window forget positions that no row sees any more.

Entries keep their offsets; the memory of forgotten entries is returned to the system and reads as zeros.
"""

from __future__ import annotations

import torch

from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kv.cache_rows import CacheRows, CacheShape, FilledPages, ask_for_small_pages, give_back
from swiftbatch.worker.kv.kv_capacity import FORGETS_EVERY, NUM_ASKED


class Window:
    """The run of positions that layers with a window have forgotten, and the positions that these layers must keep."""

    def __init__(self, size: int, share: float, rows: CacheRows) -> None:
        """Forget whole pages of `rows`, or many positions at a time if these have no pages.

        `share` is that of these layers in the bytes of a position.
        """
        self.share, self._rows = share, rows
        self.lost = range(0)
        self._size, self._step, self._least = size, rows.page or BLOCK, rows.page or FORGETS_EVERY
        self._copies_end = 0  # positions before it are kept for copies
        self._first_asked: int | None = None  # positions from it on are kept for `kv`; None: none are
        self._distance = 0  # rollbacks may go so far back

    @property
    def holds_unwritten(self) -> bool:
        return self._first_asked is not None

    @property
    def lacks_asked(self) -> bool:
        return self._first_asked is not None and self._first_asked < self.lost.stop

    def retain(self, from_: int, until: int | None = None) -> None:
        """Keep positions as `FullKVCache.retain` does."""
        if until is not None:
            self._copies_end = max(self._copies_end, until)
        elif from_ < 0:
            self._distance = -from_
        else:
            self._first_asked = from_

    def release(self, until: int | None, length: int) -> None:
        """Stop keeping positions as `FullKVCache.release` does."""
        if until is None:
            self._copies_end = self._distance = 0
            if self.lost and not self._is_asked(self.lost.start):
                self._rows.give_back(0, self.lost.stop, 0)
                self.lost = range(self.lost.stop)
        elif self._first_asked is not None:
            self._first_asked = max(self._first_asked, until)
        self.forget(length)

    def forget(self, length: int) -> None:
        """Free positions that no row after `length` sees, many at a time."""
        end = length - self._distance - NUM_ASKED - self._size
        end = end if self._first_asked is None else min(end, self._first_asked)
        end -= end % self._step
        first = self.lost.start if self.lost else self._copies_end
        start = max(first, self.lost.stop)
        if end - start >= self._least:
            self._rows.give_back(start, end, first)
            self.lost = range(first, end)

    def end_of_cut(self, length: int) -> int:
        """Return where a rollback to `length` ends: earlier if rows after `length` would see forgotten positions."""
        end = length if self.has_all_behind(length) else self.lost.start
        if end <= self.lost.start:
            self.lost = range(0)
        return end

    def has_all_behind(self, length: int) -> bool:
        """Return whether rows after the first `length` positions see no forgotten positions."""
        return not self.lost or length <= self.lost.start or length - self._size >= self.lost.stop

    def refuse_lost(self, start: int, end: int) -> None:
        """Raise ValueError if some of these positions are forgotten."""
        if max(start, self.lost.start) < min(end, self.lost.stop):
            raise ValueError(f"found positions {start:,} to {end:,}, of which {self.lost} are forgotten")

    def _is_asked(self, position: int) -> bool:
        return self._first_asked is not None and self._first_asked < position


class WindowedRows(CacheRows):
    """Rows on a CPU; only layers without a window grow with the text."""

    def __init__(self, shape: CacheShape, buffer: torch.Tensor) -> None:
        super().__init__(shape, buffer)
        layers = [(size, part) for each, size in enumerate(shape.windows) for part in self.stored(each, 0)]
        self._whole_parts = [FilledPages(part) for size, part in layers if not size]
        windowed = [part for size, part in layers if size]
        self._stripes = [rows for part in windowed for rows in part]  # [capacity, row_width] rows of one head
        for part in windowed:  # the system limits such advice to some ten thousand ranges
            ask_for_small_pages(part)

    def fill(self, length: int) -> None:
        for part in self._whole_parts:
            part.fill(length)

    def give_back(self, start: int, end: int, first: int) -> None:
        start = max(first, start - FORGETS_EVERY)  # a page that was partly in use last time may be free now
        for stripe in self._stripes:
            give_back(stripe[start:end])
