"""The cache of a model some of whose layers have a window: there it forgets the positions that no row sees any more.

Every entry keeps its place, so the kernels read what they read without this, in the same order. The memory alone is
given back: what was there is zeros from then on, and nothing reads it. Positions are held as long as somebody may ask
for them: a checkpoint that has not written them, others that have the same first tokens, or rows behind a place that
the sequence may go back to.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from swiftbatch.worker.caches.full import CacheShape, FullKVCache
from swiftbatch.worker.caches.huge_pages import FilledPages, ask_for_small_pages, give_back
from swiftbatch.worker.caches.room import FORGETS_EVERY, NUM_ASKED
from swiftbatch.worker.kernels.sizes import BLOCK


class WindowedKVCache(FullKVCache):
    """A `FullKVCache` on a CPU whose memory grows with the text in layers without a window alone.

    What is forgotten is one run of positions: those behind the ones that others copy, up to a window behind the end.
    """

    def __init__(self, shape: CacheShape, max_length: int) -> None:
        super().__init__(shape, max_length)
        sizes = [size for size in shape.windows if size is not None]
        self._window, self._share = max(sizes), len(sizes) / shape.num_layers
        self._lost = range(0)  # positions that layers with a window have forgotten
        self._copies_end = 0  # positions before it are not forgotten
        self._first_asked: int | None = None  # nor those from here on, which `kv` will be asked for; None: for none
        self._distance = 0  # that the sequence may go back
        self._filled = None
        self._whole_layers = [FilledPages(self._buffer[each]) for each, size in enumerate(shape.windows) if not size]
        windowed = [self._buffer[each].flatten(0, 1) for each, size in enumerate(shape.windows) if size]
        self._stripes = [rows for layer in windowed for rows in layer]  # [capacity, row_width] of one head's rows
        for layer in windowed:  # whole layers: a system has room for some ten thousand such wishes
            ask_for_small_pages(layer)

    @property
    def num_held(self) -> int:
        return self.length - int(self._share * len(self._lost))

    def kv(self, start: int, end: int) -> NDArray[Any]:
        """As `FullKVCache.kv` has it. Raises ValueError for positions that layers have forgotten."""
        if max(start, self._lost.start) < min(end, self._lost.stop):
            raise ValueError(f"found positions {start:,} to {end:,}, of which {self._lost} are forgotten")
        return super().kv(start, end)

    def prefix(self, length: int) -> FullKVCache:
        """View as `FullKVCache.prefix` does; the view forgets nothing. Raises ValueError for a forgotten end."""
        if not self._has_all_behind(length):
            raise ValueError(f"found a prefix of {length:,} positions, whose rows see some of {self._lost}: forgotten")
        view = super().prefix(length)
        view.expect_reads(self._lost.stop)
        return view

    def roll_back(self, length: int) -> None:
        """Forget all positions from `length` on; where rows there see forgotten ones, from the first of these on."""
        super().roll_back(length if self._has_all_behind(length) else self._lost.start)
        if self.length <= self._lost.start:
            self._lost = range(0)

    def copyable_end(self, limit: int) -> int:
        end = super().copyable_end(limit)
        return min(end, self._lost.start) if self._lost else end

    def expect_copies(self, end: int) -> None:
        self._copies_end = max(self._copies_end, end)

    def expect_returns(self, distance: int) -> None:
        self._distance = distance

    def expect_reads(self, start: int) -> None:
        self._first_asked = start
        if start < self._lost.stop:
            self.roll_back(self._lost.start)

    def end_reads(self, end: int) -> None:
        if self._first_asked is not None:
            self._first_asked = max(self._first_asked, end)

    def _grow(self, length: int) -> None:
        super()._grow(length)
        for layer in self._whole_layers:
            layer.fill(length)
        self._forget()

    def _forget(self) -> None:
        """Give back the memory of what no row sees that may still come, many positions at a time."""
        end = self.length - self._distance - NUM_ASKED - self._window
        end = (end if self._first_asked is None else min(end, self._first_asked)) // BLOCK * BLOCK
        start = self._lost.start if self._lost else self._copies_end
        if end - max(start, self._lost.stop) < FORGETS_EVERY:
            return
        first = max(start, self._lost.stop - FORGETS_EVERY)  # a page that was not whole the last time is by now
        for stripe in self._stripes:
            give_back(stripe[first:end])
        self._lost = range(start, end)

    def _has_all_behind(self, length: int) -> bool:
        """Tell whether rows behind the first `length` positions see nothing that is forgotten."""
        return not self._lost or length <= self._lost.start or length - self._window >= self._lost.stop
