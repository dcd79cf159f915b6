"""Layers with a window forget the positions that no row sees any more.

Every entry keeps its place, so the kernels read what they read without this, in the same order. The memory alone is
given back: what was there is zeros from then on, and nothing reads it. Positions are held as long as somebody may ask
for them: a checkpoint that has not written them, others that have the same first tokens, or rows behind a place that
the sequence may go back to.
"""

from __future__ import annotations

import torch

from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kv.cache_rows import CacheRows, CacheShape
from swiftbatch.worker.kv.huge_pages import FilledPages, ask_for_small_pages, give_back
from swiftbatch.worker.kv.kv_capacity import FORGETS_EVERY, NUM_ASKED


class Window:
    """The positions that some layers of a sequence have forgotten, and those that they hold beside what rows see.

    Forgotten positions are one run: it begins behind those that others copy, and ends a window before the end.
    """

    def __init__(self, size: int, num_layers: int, page: int | None = None) -> None:
        """`num_layers` layers see `size` positions at most, and forget whole pages of so many; None: many at a time."""
        self.num_layers = num_layers
        self.lost = range(0)
        self._size, self._page = size, page
        self._copies_end = 0  # positions before it are not forgotten
        self._first_asked: int | None = None  # nor those from here on, which `kv` will be asked for; None: for none
        self._distance = 0  # that the sequence may go back

    @property
    def holds_unwritten(self) -> bool:
        """Whether positions are held until a checkpoint has them."""
        return self._first_asked is not None

    @property
    def lacks_asked(self) -> bool:
        """Whether some of the positions that `kv` will be asked for are forgotten."""
        return self._first_asked is not None and self._first_asked < self.lost.stop

    def retain(self, from_: int, until: int | None = None) -> None:
        """Hold positions as `FullKVCache.retain` says."""
        if until is not None:
            self._copies_end = max(self._copies_end, until)
        elif from_ < 0:
            self._distance = -from_
        else:
            self._first_asked = from_

    def release(self, until: int | None, length: int, rows: CacheRows) -> None:
        """Hold positions no more as `FullKVCache.release` says."""
        if until is None:
            self._copies_end = self._distance = 0
            if self.lost and not self._is_asked(self.lost.start):
                rows.give_back(0, self.lost.stop, 0)
                self.lost = range(self.lost.stop)
        elif self._first_asked is not None:
            self._first_asked = max(self._first_asked, until)
        self.forget(length, rows)

    def forget(self, length: int, rows: CacheRows) -> None:
        """Give back the memory of what no row behind `length` positions sees, many positions at a time."""
        end = length - self._distance - NUM_ASKED - self._size
        end = end if self._first_asked is None else min(end, self._first_asked)
        end -= end % (self._page or BLOCK)
        first = self.lost.start if self.lost else self._copies_end
        start = max(first, self.lost.stop)
        if end - start >= (self._page or FORGETS_EVERY):
            rows.give_back(start, end, first)
            self.lost = range(first, end)

    def end_of_cut(self, length: int) -> int:
        """Where a way back to `length` positions ends: at the first forgotten one, where rows there see some of these.

        Nothing is forgotten any more if it ends there.
        """
        end = length if self.has_all_behind(length) else self.lost.start
        if end <= self.lost.start:
            self.lost = range(0)
        return end

    def has_all_behind(self, length: int) -> bool:
        """Tell whether rows behind the first `length` positions see nothing that is forgotten."""
        return not self.lost or length <= self.lost.start or length - self._size >= self.lost.stop

    def refuse_lost(self, start: int, end: int) -> None:
        """Raise ValueError where some of these positions are forgotten."""
        if max(start, self.lost.start) < min(end, self.lost.stop):
            raise ValueError(f"found positions {start:,} to {end:,}, of which {self.lost} are forgotten")

    def _is_asked(self, position: int) -> bool:
        return self._first_asked is not None and self._first_asked < position


class WindowedRows(CacheRows):
    """Rows on a CPU whose memory grows with the text in layers without a window alone."""

    def __init__(self, shape: CacheShape, buffer: torch.Tensor) -> None:
        super().__init__(shape, buffer)
        sizes = [size for size in shape.windows if size is not None]
        self.window = Window(max(sizes), len(sizes))
        self._whole_layers = [FilledPages(buffer[each]) for each, size in enumerate(shape.windows) if not size]
        windowed = [buffer[each].flatten(0, 1) for each, size in enumerate(shape.windows) if size]
        self._stripes = [rows for layer in windowed for rows in layer]  # [capacity, row_width] of one head's rows
        for layer in windowed:  # whole layers: a system has room for some ten thousand such wishes
            ask_for_small_pages(layer)

    def fill(self, length: int) -> None:
        for layer in self._whole_layers:
            layer.fill(length)

    def give_back(self, start: int, end: int, first: int) -> None:
        start = max(first, start - FORGETS_EVERY)  # a page that was not whole the last time is by now
        for stripe in self._stripes:
            give_back(stripe[start:end])
