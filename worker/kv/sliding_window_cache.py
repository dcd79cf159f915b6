"""The cache of a model some of whose layers have a window: there it forgets the positions that no row sees any more.

Every entry keeps its place, so the kernels read what they read without this, in the same order. The memory alone is
given back: what was there is zeros from then on, and nothing reads it. Positions are held as long as somebody may ask
for them: a checkpoint that has not written them, others that have the same first tokens, or rows behind a place that
the sequence may go back to.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kv.full_cache import CacheShape, FullKVCache
from swiftbatch.worker.kv.huge_pages import FilledPages, ask_for_small_pages, give_back
from swiftbatch.worker.kv.kv_capacity import FORGETS_EVERY, NUM_ASKED


class ForgettingCache(FullKVCache):
    """A `FullKVCache` that forgets positions that no row of layers with a window sees any more, in any kind of memory.

    Forgotten positions are one run: it begins behind those that others copy, and ends a window before the end.
    """

    _window: int  # positions that a row sees at most
    _share = 1.0  # of the layers that forget
    _granule = BLOCK  # positions, of whose multiples one is the end of what is forgotten
    _lost = range(0)  # positions that layers with a window have forgotten
    _copies_end = 0  # positions before it are not forgotten
    _first_asked: int | None = None  # nor those from here on, which `kv` will be asked for; None: for none
    _distance = 0  # that the sequence may go back

    @property
    def num_held(self) -> int:
        return self.length - int(self._share * len(self._lost))

    def kv(self, start: int, end: int) -> NDArray[Any]:
        """Return what `FullKVCache.kv` does. Raises ValueError for positions that layers have forgotten."""
        if max(start, self._lost.start) < min(end, self._lost.stop):
            raise ValueError(f"found positions {start:,} to {end:,}, of which {self._lost} are forgotten")
        return super().kv(start, end)

    def prefix(self, length: int) -> FullKVCache:
        """View as `FullKVCache.prefix` does; the view forgets nothing. Raises ValueError for a forgotten end."""
        if not self._has_all_behind(length):
            raise ValueError(f"found a prefix of {length:,} positions, whose rows see some of {self._lost}: forgotten")
        view = super().prefix(length)
        view.retain(self._lost.stop)
        return view

    def roll_back(self, length: int) -> None:
        """Forget all positions from `length` on; where rows there see forgotten ones, from the first of these on."""
        end = length if self._has_all_behind(length) else self._lost.start
        if end <= self._lost.start:
            self._lost = range(0)  # first: a page that is taken on the way would count as one of the lost ones
        super().roll_back(end)
        if not self._has_all_behind(self.length):
            self.roll_back(self.length)  # pages may have brought it further back

    def copyable_end(self, limit: int) -> int:
        end = super().copyable_end(limit)
        return min(end, self._lost.start) if self._lost else end

    def retain(self, from_: int, until: int | None = None) -> None:
        if until is not None:
            self._copies_end = max(self._copies_end, until)
        elif from_ < 0:
            self._distance = -from_
        else:
            self._first_asked = from_
            if from_ < self._lost.stop:
                self.roll_back(self._lost.start)

    def release(self, until: int | None = None) -> None:
        if until is None:
            self._copies_end = self._distance = 0
        elif self._first_asked is not None:
            self._first_asked = max(self._first_asked, until)

    def _grow(self, length: int) -> None:
        super()._grow(length)
        self._forget()

    def _forget(self) -> None:
        """Give back the memory of what no row sees that may still come, many positions at a time."""
        end = self.length - self._distance - NUM_ASKED - self._window
        end = end if self._first_asked is None else min(end, self._first_asked)
        end -= end % self._granule
        start = self._lost.start if self._lost else self._copies_end
        if end - max(start, self._lost.stop) < self._num_at_once():
            return
        self._give_back(max(start, self._lost.stop), end, start)
        self._lost = range(start, end)

    def _num_at_once(self) -> int:
        """The least positions that are forgotten at a time."""
        return FORGETS_EVERY

    def _give_back(self, start: int, end: int, first: int) -> None:
        """Give back the memory of positions `[start, end)` of these layers; those from `first` on are lost, too."""
        raise NotImplementedError

    def _has_all_behind(self, length: int) -> bool:
        """Tell whether rows behind the first `length` positions see nothing that is forgotten."""
        return not self._lost or length <= self._lost.start or length - self._window >= self._lost.stop


class WindowedKVCache(ForgettingCache):
    """A `FullKVCache` on a CPU whose memory grows with the text in layers without a window alone."""

    def __init__(self, shape: CacheShape, max_length: int) -> None:
        super().__init__(shape, max_length)
        sizes = [size for size in shape.windows if size is not None]
        self._window, self._share = max(sizes), len(sizes) / shape.num_layers
        self._filled = None
        self._whole_layers = [FilledPages(self._buffer[each]) for each, size in enumerate(shape.windows) if not size]
        windowed = [self._buffer[each].flatten(0, 1) for each, size in enumerate(shape.windows) if size]
        self._stripes = [rows for layer in windowed for rows in layer]  # [capacity, row_width] of one head's rows
        for layer in windowed:  # whole layers: a system has room for some ten thousand such wishes
            ask_for_small_pages(layer)

    def _grow(self, length: int) -> None:
        for layer in self._whole_layers:
            layer.fill(length)
        super()._grow(length)

    def _give_back(self, start: int, end: int, first: int) -> None:
        start = max(first, start - FORGETS_EVERY)  # a page that was not whole the last time is by now
        for stripe in self._stripes:
            give_back(stripe[start:end])
