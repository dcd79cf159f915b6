"""The caches of a GPU worker whose layers with a window forget: these have a pool of pages of their own.

A sequence has pages of both pools. A position lies at the same entry of either, so kernels read the same blocks in the
same order as without this; a second table says in which page of the second pool one is. A page whose positions no row
sees any more is another sequence's. `sliding_window_cache.py` says what is held beyond that, and for whom.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.worker.kernels.kernel_sizes import BLOCK, ROW_CHOICES
from swiftbatch.worker.kv.full_cache import CacheShape, CacheSource, FullKVCache
from swiftbatch.worker.kv.host_copies import Staging
from swiftbatch.worker.kv.kv_capacity import PagesError, PoolSize
from swiftbatch.worker.kv.paged_arena import NO_PAGE, PagedArena, PagedKVCache, PageLease, SlotLease
from swiftbatch.worker.kv.sliding_window_cache import ForgettingCache
from swiftbatch.worker.model.architectures.attention_layers import Windows


class WindowArena(PagedArena):
    """A `PagedArena` of the layers that see all, with `windowed` beside it, that of the others."""

    windowed: WindowPool

    def __init__(
        self, shape: CacheShape, num_slots: int, max_length: int, pool: PoolSize, staging: Staging | None = None
    ) -> None:
        """`shape` is that of all layers, some of which have windows; `pool` says the pages of both pools."""
        assert pool.windows is not None
        self.whole_layers, self.window_layers = layers_by_window(shape.windows)
        super().__init__(shape, num_slots, max_length, pool, staging)
        sizes = tuple(size for size in shape.windows if size is not None)
        windowed = replace(shape, num_layers=len(sizes), windows=sizes)
        window_pool = PoolSize(pool.windows.num_pages, pool.page)
        self.windowed = WindowPool(windowed, num_slots, max_length, window_pool, staging)

    @contextlib.contextmanager
    def moving_together(self) -> Iterator[None]:
        with super().moving_together(), self.windowed.moving_together():
            yield

    def num_pages_for(self, caches: Iterable[FullKVCache]) -> tuple[int | None, int | None]:
        held = list(caches)
        num_windowed = self.windowed.pool.num_free + sum(cache.num_window_pages for cache in held)
        return super().num_pages_for(held)[0], num_windowed

    @property
    def _num_layers(self) -> int:
        return len(self.whole_layers)

    def _cache(self, lease: SlotLease, max_length: int) -> WindowSlotCache:
        assert isinstance(lease, PageLease)
        return WindowSlotCache(self, lease, max_length, self._staging)


class WindowPool(PagedArena):
    """The pages of layers with a window; slots are those of the arena beside it."""

    def beside(self, slot: int, max_length: int) -> WindowedPages:
        """An empty cache of these layers for who has a slot."""
        return WindowedPages(self, self._lease(slot), max_length, self._staging)

    def _allocate(self) -> torch.Tensor:
        return super()._allocate().zero_()  # forwards are measured over what nobody has written


class WindowedPages(ForgettingCache, PagedKVCache):
    """The layers with a window of a sequence: its list of pages has none where all positions of one are forgotten."""

    def __init__(self, arena: WindowPool, lease: PageLease, max_length: int, staging: Staging | None) -> None:
        super().__init__(arena, lease, max_length, staging)
        widest = max(size or 0 for size in arena.shape.windows)
        self._window = widest + BLOCK  # kernels read all that the first row of a block sees
        self._granule = arena.page

    @property
    def holds_unwritten(self) -> bool:
        """Return whether positions are held until a checkpoint has them."""
        return self._first_asked is not None

    @property
    def num_lost(self) -> int:
        """The pages of its list that are others' by now."""
        return max(0, self._lost.stop // self._page - -(-self._lost.start // self._page))

    def reserve(self, end: int) -> None:
        self.pages.extend([NO_PAGE] * (self._lost.stop // self._page - len(self.pages)))
        try:
            super().reserve(end)
        except PagesError:
            self.release()
            super().reserve(end)

    def release(self, until: int | None = None) -> None:
        super().release(until)
        first = self._lost.start if self._first_asked is None else min(self._lost.start, self._first_asked)
        if until is None and self._lost and first == self._lost.start:
            self._give_back(0, self._lost.stop, 0)
            self._lost = range(self._lost.stop)
        self._forget()

    def _grow(self, length: int) -> None:
        self.length = length
        self._forget()  # first: lengths that nobody has written, to measure forwards at, take no more pages than others
        self.reserve(length)

    def _forget(self) -> None:
        if not self._is_view:
            super()._forget()

    def _num_at_once(self) -> int:
        return self._page

    def _give_back(self, start: int, end: int, first: int) -> None:
        """Give back the pages of which all is lost."""
        numbers = slice(-(-start // self._page), end // self._page)
        lost = self.pages[numbers]
        self.pages[numbers] = [NO_PAGE] * len(lost)
        self._arena.pool.give_back(lost)

    def _joined(self, rows: torch.Tensor, positions: slice) -> torch.Tensor:
        """Join rows as `PagedKVCache._joined` does; rows that are forgotten are zeros."""
        parts = [
            rows[..., own, :] if own.start >= 0 else torch.zeros_like(rows[..., : own.stop - own.start, :])
            for _, own in self._pieces(positions.start, positions.stop)
        ]
        return torch.cat(parts, dim=-2) if parts else rows[..., :0, :]


class WindowSlotCache(PagedKVCache):
    """A `FullKVCache` in pages of two pools: what it is told, its layers with a window are told as well."""

    _arena: WindowArena

    def __init__(self, arena: WindowArena, lease: PageLease, max_length: int, staging: Staging | None) -> None:
        super().__init__(arena, lease, max_length, staging)
        self._windowed = arena.windowed.beside(lease.slot, max_length)

    @property
    def window_pages(self) -> list[int]:  # type: ignore[override]
        return self._windowed.pages

    @property
    def num_window_pages(self) -> int:  # type: ignore[override]
        return len(self.window_pages) - self._windowed.num_lost

    def num_window_pages_for(self, end: int) -> int:
        if not self._windowed.holds_unwritten:
            end = min(end, self.length + ROW_CHOICES[-1])  # those of one forward: behind each, others are forgotten
        return self.num_window_pages + max(0, -(-end // self._page) - len(self.window_pages))

    @property
    def num_held(self) -> int:
        share = len(self._arena.window_layers) / self.shape.num_layers
        return self.length - int(share * (self.length - self._windowed.num_held))

    def reserve(self, end: int) -> None:
        super().reserve(end)
        self._windowed.reserve(end)

    def stored_between(self, layer: int, positions: slice) -> tuple[torch.Tensor, torch.Tensor]:
        cache, own = self._of_layer(layer)
        return PagedKVCache.stored_between(cache, own, positions)

    def write(
        self, layer: int, first_entry: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache, own = self._of_layer(layer)
        PagedKVCache.write(cache, own, first_entry, key, value)
        return self.layer(layer)

    def advance(self, num_positions: int) -> None:
        self._windowed.advance(num_positions)
        super().advance(num_positions)

    def kv(self, start: int, end: int) -> NDArray[Any]:
        """Return what `FullKVCache.kv` does. Raises ValueError for positions that layers have forgotten."""
        windowed, whole = self._windowed.kv(start, end), super().kv(start, end)
        found = np.empty((self.shape.num_layers, self._rows_per_layer, *whole.shape[1:]), dtype=whole.dtype)
        found[list(self._arena.whole_layers)] = whole.reshape(-1, *found.shape[1:])
        found[list(self._arena.window_layers)] = windowed.reshape(-1, *found.shape[1:])
        return found.reshape(-1, *whole.shape[1:])

    def load(self, kv: NDArray[Any]) -> None:
        """Load as `FullKVCache.load` does, a page at a time: positions behind windows are forgotten on the way."""
        if len(kv) != (num_rows := self.shape.num_layers * self._rows_per_layer):
            raise ValueError(f"found keys and values of {len(kv)} rows, expected {num_rows}")
        by_layer = kv.reshape(self.shape.num_layers, -1, *kv.shape[1:])
        whole, windowed = by_layer[list(self._arena.whole_layers)], by_layer[list(self._arena.window_layers)]
        for start in range(0, kv.shape[1], self._page):
            part = slice(start, start + self._page)
            super().load(whole[:, :, part].reshape(-1, *whole[0, :, part].shape[1:]))
            self._windowed.load(windowed[:, :, part].reshape(-1, *windowed[0, :, part].shape[1:]))

    def copyable_end(self, limit: int) -> int:
        return self._windowed.copyable_end(super().copyable_end(limit))

    def retain(self, from_: int, until: int | None = None) -> None:
        self._windowed.retain(from_, until)
        self._level()

    def release(self, until: int | None = None) -> None:
        self._windowed.release(until)

    def copy_from(self, source: CacheSource, end: int) -> None:
        """Copy as `PagedKVCache` does, in both pools as far as there are pages in both.

        Of what has no pages to share a part alone, which takes some: jobs are counted with so many.
        """
        try:
            if isinstance(source, WindowSlotCache):
                self._windowed.copy_from(source._windowed, end)
            else:
                end = min(end, self.length + ROW_CHOICES[-1])
            super().copy_from(source, end)
        finally:
            self._level()

    def prefix(self, length: int) -> FullKVCache:
        """View as `FullKVCache.prefix` does. Raises ValueError for an end whose rows see what is forgotten."""
        view, windowed = copy.copy(self), self._windowed.prefix(length)
        assert isinstance(windowed, WindowedPages)
        view._is_view, view._windowed = True, windowed
        view.roll_back(length)
        return view

    @contextlib.contextmanager
    def replayed(self, length: int, num_positions: int = 1) -> Iterator[FullKVCache]:
        with self._windowed.replayed(length, num_positions), super().replayed(length, num_positions) as view:
            yield view

    def clear(self) -> None:
        """Make zero what the layers that see all have; windows are zeros when a worker starts, and take pages later."""
        super().reserve(self._capacity)
        for _, rows in self._parts(0, self._capacity):
            rows.zero_()

    def roll_back(self, length: int) -> None:
        """Forget all positions from `length` on; where rows there see forgotten ones, from the first of these on."""
        self._windowed.roll_back(length)
        super().roll_back(self._windowed.length)
        self._level()

    def _move(self, path: list[int]) -> None:
        self._windowed._move(path)
        super()._move(path)

    def _level(self) -> None:
        """Have as many positions in both pools: one may have had no free page for some."""
        if self.length != self._windowed.length:
            self.roll_back(min(self.length, self._windowed.length))

    def _of_layer(self, layer: int) -> tuple[PagedKVCache, int]:
        """The pages that a layer lies in, and its number among the layers there."""
        if layer in self._arena.window_layers:
            return self._windowed, self._arena.window_layers.index(layer)
        return self, self._arena.whole_layers.index(layer)

    @property
    def _rows_per_layer(self) -> int:
        return self.shape.num_parts * self.shape.num_kv_heads


def layers_by_window(windows: Windows) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of the layers that see all, and of those with a window."""
    numbers = range(len(windows))
    return tuple(each for each in numbers if windows[each] is None), tuple(each for each in numbers if windows[each])
