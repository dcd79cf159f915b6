"""Key-value cache of one sequence: all committed positions, and room after them for one draft tree."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.jobs.checkpoints.kv_segments import LayerStates
from swiftbatch.worker.kernels.cuda.cuda_row_table import PageTable
from swiftbatch.worker.kernels.kernel_sizes import ROW_CHOICES
from swiftbatch.worker.kv.cache_rows import NO_PAGE, NUMPY_DTYPES, CacheRows, bits_of
from swiftbatch.worker.kv.cache_rows import CacheShape as CacheShape
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES as MAX_TREE_NODES
from swiftbatch.worker.kv.kv_capacity import PagesError
from swiftbatch.worker.kv.recurrent_cache import RecurrentStates, StateStore
from swiftbatch.worker.kv.sliding_windows import Window, WindowedRows


class CacheSource(Protocol):
    """A cache or stored copy that has keys and values of a text's first positions."""

    def kv(self, start: int, end: int) -> NDArray[Any]:
        """Return keys and values of positions `[start, end)`, as `FullKVCache.kv` does."""

    def states_at(self, end: int) -> LayerStates | None:
        """Return the recurrent states after the first `end` positions."""


@dataclass(frozen=True)
class LayerStore:
    """Rows of some layers; those with a `window` forget positions that no row sees any more."""

    rows: CacheRows
    layers: Sequence[int]
    window: Window | None = None

    def reserve(self, end: int, length: int) -> None:
        """Have room for entries below `end`; if the pool is full, free positions held for other sequences."""
        if not self.rows.page:
            return
        try:
            self.rows.reserve(end)
        except PagesError:
            if self.window is None:
                raise
            self.window.release(None, length)
            self.rows.reserve(end)

    def grow(self, length: int, forgets: bool) -> None:
        """Note that the first `length` positions are committed."""
        if forgets and self.window is not None:
            self.window.forget(length)  # frees pages for the call below
        self.reserve(length, length)
        self.rows.fill(length)

    def cut(self, length: int) -> int:
        """Forget positions from `length` on; return how many are left."""
        end = self.rows.cut(length if self.window is None else self.window.end_of_cut(length))
        return end if self.window is None or self.window.has_all_behind(end) else self.cut(end)

    @property
    def num_pages(self) -> int:
        return len(self.rows.pages) - self.rows.pages.count(NO_PAGE)

    def num_pages_for(self, end: int, length: int) -> int:
        """Return the pages that the store will have once it holds entries below `end`."""
        if not self.rows.page:
            return 0
        if self.window is not None and not self.window.holds_unwritten:
            end = min(end, length + ROW_CHOICES[-1])  # after each forward, older positions are forgotten
        return self.num_pages + max(0, -(-end // self.rows.page) - len(self.rows.pages))


class FullKVCache:
    """Keys, values and states of a sequence; entry = absolute position.

    The first `length` entries are committed. A step writes the root and the draft tree's nodes after them; `commit`
    moves the accepted path next to the root.
    """

    def __init__(
        self,
        shape: CacheShape,
        max_length: int,
        buffer: torch.Tensor | None = None,
        *,
        stores: Sequence[LayerStore] = (),
        states: StateStore[Any] | None = None,
    ) -> None:
        """Use `buffer`, `stores` or new memory."""
        self.shape = shape
        self.length = 0
        self.first_angle = shape.first_angle(max_length)  # never changes
        self.adapter = 0  # the number of the LoRA adapter that all rows are computed with; 0: none
        self.num_copied = 0  # another sequence had these first positions
        self.layer_states = states
        self._is_view = False
        if not stores:
            is_own = buffer is None
            buffer = shape.new_buffer(max_length) if buffer is None else buffer
            stores = (LayerStore(CacheRows(shape, buffer, is_own), range(shape.num_layers)),)
        self.stores = stores
        self.rows = stores[0].rows  # those of layers without a window, if there are any

    @property
    def origin(self) -> tuple[int, int]:
        """Return what, besides tokens, decides keys and values: first angle and adapter."""
        return self.first_angle, self.adapter

    @property
    def is_by_position(self) -> bool:
        """Return whether keys and values are the whole cache, without recurrent states."""
        return self.layer_states is None

    @property
    def comes_by_layer(self) -> bool:
        return self.rows.comes_by_layer

    @property
    def boundary(self) -> int:
        return 0 if self.layer_states is None else self.layer_states.boundary

    @property
    def slot(self) -> int:
        return self.rows.slot

    @property
    def pages(self) -> Sequence[int]:
        return self.rows.pages

    @property
    def window_pages(self) -> Sequence[int]:
        return self.stores[1].rows.pages if len(self.stores) > 1 else ()

    @property
    def page_table(self) -> PageTable | None:
        """Return the first store's pages on the device, or None if the store's rows lie in order."""
        return self.rows.page_table

    def reserve(self, end: int) -> None:
        """Have room for entries below `end`. Raises KVRoomError if memory is short."""
        for store in self.stores:
            store.reserve(end, self.length)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of one layer on the device, each `[num_kv_heads, capacity, row_width]`."""
        rows, number = self._of_layer(index)
        return rows.layer(number, self.length)

    def stored(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, number = self._of_layer(index)
        return rows.stored(number, self.length)

    def stored_between(self, layer: int, positions: slice) -> tuple[torch.Tensor, torch.Tensor]:
        rows, number = self._of_layer(layer)
        return rows.stored_between(number, positions, self.length)

    def write(
        self, layer: int, first_entry: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store rows `[num_kv_heads, num_rows, head_dim]`; return the layer's keys and values for attention."""
        self.reserve(first_entry + key.shape[1])
        rows, number = self._of_layer(layer)
        return rows.write(number, first_entry, key, value, self.length)

    def commit(self, path: list[int]) -> None:
        """Commit the root and the accepted nodes `path`; drop all other nodes."""
        if path:  # the root already lies in its place
            self.reserve(self.length + 2 + max(path))
            for store in self.stores:
                store.rows.move(self.length, path)
            if self.layer_states is not None:
                self.layer_states.move(self.length, path)
        self.advance(1 + len(path))

    def advance(self, num_positions: int) -> None:
        """Commit the next rows, written in place."""
        start, end = self.length, self.length + num_positions
        self._grow(end)
        if self.layer_states is not None:
            self.layer_states.advance(start, end)

    def kv(self, start: int, end: int) -> NDArray[Any]:
        """Return keys and values of committed positions, `[num_rows, end - start, row_width]`; 16-bit floats as their
        bits.

        On a CPU this is a view, which other threads may read: committed rows never change. Raises ValueError for
        forgotten positions.
        """
        for window in self._windows():
            window.refuse_lost(start, end)
        found = [store.rows.kv(start, end) for store in self.stores]
        if len(found) == 1:
            return found[0]
        kv = np.empty((math.prod(self.shape.rows_size), *found[0].shape[1:]), dtype=found[0].dtype)
        for store, part in zip(self.stores, found, strict=True):
            kv[self.shape.rows_of(store.layers)] = part
        return kv

    def load(self, kv: NDArray[Any]) -> None:
        """Commit positions after `length` from a result of `kv`. Raises ValueError for another shape or dtype."""
        shape, bits, most = self.shape, bits_of(self.rows.buffer), self.rows.capacity - MAX_TREE_NODES
        num_rows, expected = math.prod(shape.rows_size), np.dtype(NUMPY_DTYPES[bits.dtype])
        end = self.length + kv.shape[1]
        if (kv.shape[0], kv.shape[2], kv.dtype) != (num_rows, shape.row_width, expected) or end > most:
            raise ValueError(
                f"found keys and values of {kv.dtype} {list(kv.shape)}, expected {expected} [{num_rows}, at most "
                f"{most - self.length}, {shape.row_width}]"
            )
        step = self.stores[-1].rows.page or max(1, kv.shape[1])
        for start in range(0, kv.shape[1], step):
            part = kv[:, start : start + step]
            end = self.length + part.shape[1]
            self.reserve(end)
            for store in self.stores:
                own = part if len(self.stores) == 1 else part[shape.rows_of(store.layers)]
                store.rows.load(self.length, own)
            self._grow(end)

    def num_readable(self, most: int) -> int:
        """Return how many of the next `most` known tokens to read in one call."""
        return most if self.layer_states is None else self.layer_states.num_readable(self.length, most)

    def states(self) -> LayerStates | None:
        """Return the newest states for a checkpoint, or None for a model without recurrent layers."""
        return self.states_at(self.boundary) if self.boundary else None

    def states_at(self, end: int) -> LayerStates | None:
        """Return the recurrent states after `end`, a result of `copyable_end`; None without recurrent layers."""
        return None if self.layer_states is None else self.layer_states.at(end)

    def set_states(self, states: LayerStates) -> None:
        """Continue from states, after keys and values were loaded. Raises ValueError for states that do not fit."""
        if self.layer_states is None:
            raise ValueError("found states of layers, expected none: all layers of the model attend")
        self.layer_states.load(states, self.length)
        self.roll_back(states.num_positions)

    def copyable_end(self, limit: int) -> int:
        """Return the last position, up to `limit`, up to which other sequences can copy this cache."""
        end, states = min(limit, self.length), self.layer_states
        end = end if states is None else states.copyable_end(limit, self.length)
        return min([end, *(window.lost.start for window in self._windows() if window.lost)])

    def retain(self, from_: int, until: int | None = None) -> None:
        """Keep positions that layers would otherwise forget; `from_` and `until` count as in a slice.

        Copies need the first `until` positions, a rollback the newest n (`from_` = -n), and `kv` the positions from
        `from_` on, until `release`.
        """
        if self.layer_states is not None:
            self.layer_states.retain(from_, until)
        for window in self._windows():
            window.retain(from_, until)
            if window.lacks_asked:
                self.roll_back(window.lost.start)

    def release(self, until: int | None = None) -> None:
        """Stop keeping positions before `until` for `kv`; if None, stop keeping any, also for copies and rollbacks."""
        for store in self.stores:
            if store.window is not None:
                store.window.release(until, self.length)

    @property
    def num_held(self) -> int:
        """Return how many positions would take the same memory in a cache that forgets nothing."""
        num_lost = (int(each.share * len(each.lost)) for each in self._windows())
        return self.length - sum(num_lost)

    def copy_from(self, source: CacheSource, end: int) -> None:
        """Commit positions from `length` to `end`, or fewer, by copying from a source with the same tokens."""
        theirs = source if isinstance(source, FullKVCache) else None
        if theirs is not None and self.rows.holds_all and theirs.rows.holds_all:
            self._copy_rows(theirs, end)
        else:
            # Unshared positions need new pages; for a job with windows, the plan has pages for one forward only.
            end = end if len(self.stores) == 1 else min(end, self.length + ROW_CHOICES[-1])
            self.load(source.kv(self.length, end))
        known = None if theirs is None else theirs.layer_states
        if self.layer_states is not None and not self.layer_states.copy(known, end):
            states = source.states_at(end)
            assert states is not None  # `copyable_end` guarantees it
            self.set_states(states)
        self.num_copied = end

    def prefix(self, length: int) -> FullKVCache:
        """Return a view of the first `length` committed positions, to run rows after them again.

        Raises ValueError if these rows see forgotten positions.
        """
        if self.layer_states is not None:
            raise NotImplementedError("a state has no view at an earlier length")
        for window in self._windows():
            if not window.has_all_behind(length):
                raise ValueError(
                    f"found a prefix of {length:,} positions, whose rows see some of {window.lost}: forgotten"
                )
        view = copy.copy(self)
        view._is_view = True
        view.roll_back(length)
        return view

    @contextlib.contextmanager
    def replayed(self, length: int, num_positions: int = 1) -> Iterator[FullKVCache]:
        """Yield the cache as it was at `length`; restore the committed rows on exit."""
        with contextlib.ExitStack() as stack:
            for store in self.stores:
                stack.enter_context(store.rows.restored(length, length + num_positions))
            yield self.prefix(length)

    def clear(self) -> None:
        for store in self.stores:
            store.rows.clear()
        if self.layer_states is not None:
            self.layer_states.clear()

    def roll_back(self, length: int) -> None:
        """Forget positions from `length` on, and earlier ones if later rows would see forgotten positions.

        The rollback also goes further back to reach a stored state, or if no page is free for a copy.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length}: {self.length} positions are committed")
        end = -1
        while not self._is_view and end != length:  # one store may have to go further back than the others
            end = length
            for store in self.stores:
                length = store.cut(length)
            if self.layer_states is not None and length != self.length:
                length = self.layer_states.cut(length)
        self.length = length

    def _grow(self, length: int) -> None:
        for store in self.stores:
            store.grow(length, forgets=not self._is_view)
        self.length = length

    def _copy_rows(self, theirs: FullKVCache, end: int) -> None:
        start = self.length
        pairs = list(zip(self.stores, theirs.stores, strict=True))
        try:
            behind = [own.rows.share(other.rows, start, end) for own, other in pairs]
            self.reserve(end)
            for (own, other), first in zip(pairs, behind, strict=True):
                own.rows.copy(other.rows, first, end)
        except (PagesError, torch.OutOfMemoryError):
            self.roll_back(start)
            raise
        self.length = end

    def _windows(self) -> Iterator[Window]:
        return (store.window for store in self.stores if store.window is not None)

    def _of_layer(self, layer: int) -> tuple[CacheRows, int]:
        store = self.stores[0] if layer in self.stores[0].layers else self.stores[1]
        return store.rows, store.layers.index(layer)


def new_cache_of(shape: CacheShape, max_length: int, buffer: torch.Tensor | None = None) -> FullKVCache:
    """Return an empty cache on the device, in `buffer` or in new memory."""
    states = None if shape.recurrent is None else RecurrentStates(shape, shape.recurrent)
    if states is None and any(shape.windows) and buffer is None:
        rows = WindowedRows(shape, shape.new_buffer(max_length))
        widest, held = max(size or 0 for size in shape.windows), shape.held_positions()
        assert held is not None
        window = Window(widest, 1 - held.share, rows)
        return FullKVCache(shape, max_length, stores=(LayerStore(rows, range(shape.num_layers), window),))
    return FullKVCache(shape, max_length, buffer, states=states)
