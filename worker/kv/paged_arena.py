"""The KV caches of all jobs on a GPU: the arena's interface, one slot for each job, or pages."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.worker.kernels.cuda.cuda_row_table import PageTable
from swiftbatch.worker.kv.full_cache import CacheShape, CacheSource, FullKVCache
from swiftbatch.worker.kv.gpu_memory_plan import slot_capacity
from swiftbatch.worker.kv.host_copies import Staging
from swiftbatch.worker.kv.kv_capacity import (
    GB,
    MAX_TREE_NODES,
    KVRoomError,
    PagesError,
    PoolSize,
    TooLongError,
    pages_of,
)

if TYPE_CHECKING:
    from swiftbatch.worker.kernels.cuda.cuda_recurrence import StateBuffers

Place = Callable[[int], int]
"""The place of a slot's entry in a pool."""


class MoveRows(Protocol):
    """Brings accepted rows next to their root, as `keep_path` has it."""

    def __call__(self, slot: int, root: int, path: Sequence[int], place: Place | None = None) -> None:
        """Move the nodes `path` of a tree whose root is entry `root` of a slot; with `place`, of a pool."""

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Within it moves wait; they are made at its end, all at once."""


class KVArena:
    """`buffer [num_layers, num_parts, num_slots, num_kv_heads, capacity, row_width]`, which never moves or grows.

    One capacity for the whole run: attention may cut splits by it, and graphs keep addresses.
    """

    holds_all = True  # layers of all slots, so that rows may move from one to another
    holds_engine = False  # whether an engine that is only tried has room beside it
    pool_size: PoolSize | None = None  # pages that all slots share; None where each has memory of its own
    pages: PageTable | None = None  # on the device, where entries of slots lie in pages of a pool
    states: StateBuffers | None = None  # of slots' layers that have some
    windowed: PagedArena | None = None  # of layers with a window, where these forget; then `buffer` is of all others

    def __init__(self, shape: CacheShape, num_slots: int, max_length: int, staging: Staging | None = None) -> None:
        """Slots for sequences of at most `max_length` positions. Checkpoints go through `staging`, None on a CPU."""
        self.shape, self.num_slots, self.capacity = shape, num_slots, slot_capacity(max_length)
        self.num_drafted = num_slots  # sequences that drafts have room for beside their caches
        self.buffer = self._allocate()
        self._staging = staging
        self.move_rows: MoveRows | None = None  # set where there is a better way than the tensors' own
        self._free = list(reversed(range(num_slots)))

    @property
    def longest_job(self) -> int:
        """Positions that a slot has room for."""
        return self.capacity - MAX_TREE_NODES

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def num_pages_for(self, caches: Iterable[FullKVCache]) -> tuple[int | None, int | None]:
        """The pages that these caches have or may take, and those of layers with a window; None without a pool."""
        return None, None

    def moving_together(self) -> contextlib.AbstractContextManager[None]:
        """Within it rows may wait to be moved; they are at its end, all at once."""
        return contextlib.nullcontext() if self.move_rows is None else self.move_rows.together()

    def new_cache(self, max_length: int) -> ArenaKVCache:
        """An empty cache in a slot, which comes back when the cache and all views of it are gone.

        Raises TooLongError for a sequence that is longer than a slot, KVRoomError where all slots are taken.
        """
        if max_length > self.longest_job:
            raise TooLongError(
                f"max_tokens: a job of {max_length:,} positions is longer than a slot of this worker's GPU, "
                f"{self.longest_job:,} positions in {self.capacity * self.shape.bytes_per_position() / GB:,.2f} GB; "
                "use fewer max_tokens, or once the run has ended resume --retry-failed, which makes slots for its "
                "longest job"
            )
        if not self._free:
            gc.collect()  # a cache may hang in a circle of references, as a traceback makes them
        if not self._free:
            raise KVRoomError(
                f"no slot for a job of {max_length:,} positions: all {self.num_slots} of this worker's GPU are taken, "
                f"{self.buffer.numel() * self.buffer.element_size() / GB:,.2f} GB; use more --slots or --workers"
            )
        lease = self._lease(self._free.pop())
        weakref.finalize(lease, self._free.append, lease.slot)
        return self._cache(lease, max_length)

    def _allocate(self) -> torch.Tensor:
        shape = self.shape
        size = (shape.num_layers, shape.num_parts, self.num_slots, shape.num_kv_heads, self.capacity, shape.row_width)
        return torch.empty(size, dtype=shape.row_dtype, device=shape.device)

    def _lease(self, slot: int) -> SlotLease:
        return SlotLease(slot)

    def _cache(self, lease: SlotLease, max_length: int) -> ArenaKVCache:
        rows = self.buffer[:, :, lease.slot, :, : max_length + MAX_TREE_NODES]
        return ArenaKVCache(self, lease, max_length, rows, self._staging)


class SlotLease:
    """The right to a slot: whoever holds it has the slot."""

    def __init__(self, slot: int) -> None:
        self.slot = slot


class ArenaKVCache(FullKVCache):
    """A `FullKVCache` over one slot; views made by `prefix` and `replayed` share the slot with it."""

    def __init__(
        self, arena: KVArena, lease: SlotLease, max_length: int, rows: torch.Tensor, staging: Staging | None
    ) -> None:
        """`rows [num_layers, num_parts, num_kv_heads, max_length + MAX_TREE_NODES, row_width]`, wherever they lie."""
        self._lease, self._staging = lease, staging
        self._arena = arena
        super().__init__(arena.shape, max_length, rows)

    @property
    def slot(self) -> int:
        """The number of the cache's slot in the arena's buffer."""
        return self._lease.slot

    @property
    def rows(self) -> torch.Tensor:
        """The cache's part of the buffer, `[num_layers, num_parts, num_kv_heads, max_length + MAX_TREE_NODES, -]`.

        Of a pool all of it, with entries where `page_table` says.
        """
        return self._buffer

    def rows_between(self, positions: slice) -> torch.Tensor:
        """The part of `rows` at consecutive positions, in order."""
        return self.rows[..., positions, :]

    @property
    def page_table(self) -> PageTable | None:
        """The cache's pages on the device; None where `rows` are in order."""
        return None

    def fold_to(self, boundary: int) -> None:
        """Take note of a forward with rows behind a boundary, as layers with a state have it."""

    def key_addresses(self) -> list[int]:
        """Return addresses of layers' keys, `[num_kv_heads, ..., row_width]` with the strides of the arena's buffer."""
        return [self._buffer[layer, 0].data_ptr() for layer in range(len(self._buffer))]

    def commit(self, path: list[int]) -> None:
        if self._arena.move_rows is None:
            super().commit(path)
        else:
            self._arena.move_rows(self.slot, self.length, path)
            self.advance(1 + len(path))

    def copy_from(self, source: CacheSource, end: int) -> None:
        """Copy as `FullKVCache` does; from one slot to another nothing leaves the device."""
        if self._arena.holds_all and isinstance(source, ArenaKVCache):
            behind = slice(self.length, end)
            self.rows[..., behind, :] = source.rows[..., behind, :]
            self.length = self.num_copied = end
        else:
            super().copy_from(source, end)

    def _copied_out(self, rows: torch.Tensor) -> NDArray[Any]:
        return super()._copied_out(rows) if self._staging is None else self._staging.read(rows)

    def _copy_in(self, rows: torch.Tensor, kv: NDArray[np.generic]) -> None:
        if self._staging is None:
            super()._copy_in(rows, kv)
        else:
            self._staging.write(rows, kv)


# All key-value caches of a GPU worker in one pool of pages: a job has as many as it has positions, wherever they are.


NO_PAGE = -1  # in a sequence's list, where it has given one back whose positions it has forgotten


class PagePool:
    """The pages that nobody has, and how many sequences have each of the others. Any thread may ask."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(reversed(range(num_pages)))
        self._num_holders = [0] * num_pages
        self._lock = threading.RLock()  # a thread that takes pages may be the one that gives back those of a lost cache

    def take(self, count: int) -> list[int]:
        """Pages for a sequence. Raises PagesError where so many are not free."""
        if count > len(self._free):
            gc.collect()  # a cache may hang in a circle of references, as a traceback makes them
        with self._lock:
            if count > len(self._free):
                raise PagesError(
                    f"no page for a job's next positions: all {len(self._num_holders):,} of this worker's GPU are "
                    "taken; use fewer --slots, or more --workers"
                )
            pages = [self._free.pop() for _ in range(count)]
            for page in pages:
                self._num_holders[page] = 1
            return pages

    @property
    def num_free(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    def is_shared(self, page: int) -> bool:
        """Tell whether several sequences have a page."""
        return self._num_holders[page] > 1

    def share(self, pages: Sequence[int]) -> None:
        """Count one more sequence that has these pages."""
        with self._lock:
            for page in pages:
                self._num_holders[page] += 1

    def give_back(self, pages: list[int], num_kept: int = 0) -> None:
        """Take pages from a sequence that has no use for them: from the end of its list, which then has `num_kept`."""
        with self._lock:
            for page in pages[num_kept:]:
                if page == NO_PAGE:
                    continue
                self._num_holders[page] -= 1
                if not self._num_holders[page]:
                    self._free.append(page)
            del pages[num_kept:]


class PageLease(SlotLease):
    """The right to a slot, and to the pages that its entries lie in."""

    def __init__(self, slot: int) -> None:
        super().__init__(slot)
        self.pages: list[int] = []


class PagedArena(KVArena):
    """A `KVArena` whose `buffer [num_layers, num_parts, 1, num_kv_heads, num_pages * page, row_width]` all share."""

    pages: PageTable

    def __init__(
        self, shape: CacheShape, num_slots: int, max_length: int, pool: PoolSize, staging: Staging | None = None
    ) -> None:
        """Slots for sequences of at most `max_length` positions, which take pages of the pool as they grow."""
        self.pool_size, self.pool = pool, PagePool(pool.num_pages)
        self.num_pages, self.page = pool.num_pages, pool.page
        super().__init__(shape, num_slots, max_length, staging)
        size = (num_slots, pages_of(self.longest_job, pool.page))
        self.pages = PageTable(torch.zeros(size, dtype=torch.int32, device=shape.device), pool.page)

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody has."""
        return self.pool.num_free

    def num_pages_for(self, caches: Iterable[FullKVCache]) -> tuple[int | None, int | None]:
        return self.pool.num_free + sum(len(cache.pages) for cache in caches), None

    def _allocate(self) -> torch.Tensor:
        shape = self.shape
        size = (self._num_layers, shape.num_parts, 1, shape.num_kv_heads, self.num_pages * self.page, shape.row_width)
        return torch.empty(size, dtype=shape.row_dtype, device=shape.device)

    @property
    def _num_layers(self) -> int:
        """The layers that lie in the pool."""
        return self.shape.num_layers

    def _lease(self, slot: int) -> PageLease:
        lease = PageLease(slot)
        weakref.finalize(lease, self.pool.give_back, lease.pages)
        return lease

    def _cache(self, lease: SlotLease, max_length: int) -> PagedKVCache:
        assert isinstance(lease, PageLease)
        return PagedKVCache(self, lease, max_length, self._staging)


class PagedKVCache(ArenaKVCache):
    """A `FullKVCache` in pages of a pool; views made by `prefix` and `replayed` have the same ones.

    A page may be another sequence's as well where both are behind it: nobody writes there any more.
    """

    _lease: PageLease
    _arena: PagedArena

    def __init__(self, arena: PagedArena, lease: PageLease, max_length: int, staging: Staging | None) -> None:
        self._max_length, self._page, self._is_view = max_length, arena.page, False
        super().__init__(arena, lease, max_length, arena.buffer[:, :, 0], staging)

    @property
    def pages(self) -> list[int]:  # type: ignore[override]
        return self._lease.pages

    @property
    def page_table(self) -> PageTable:
        return self._arena.pages.of(self.slot)

    def reserve(self, end: int) -> None:
        known = len(self._lease.pages)
        if end > known * self._page and (num_missing := -(-min(end, self._capacity) // self._page) - known) > 0:
            self._append(self._arena.pool.take(num_missing))

    def stored(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the layer, in order, as far as there are pages."""
        return self.stored_between(index, slice(0, min(self._capacity, len(self.pages) * self._page)))

    def stored_between(self, layer: int, positions: slice) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self._joined(self._buffer[layer], positions)
        return parts[0], parts[-1]

    def rows_between(self, positions: slice) -> torch.Tensor:
        return self._joined(self._buffer, positions)

    def write(
        self, layer: int, first_entry: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = first_entry + key.shape[1]
        self.reserve(end)
        for number, own in self._pieces(first_entry, end):
            for part, rows in enumerate((key, value)[: self.shape.num_parts]):
                self._buffer[layer, part, :, own] = self.shape.kept(rows[:, number])
        return self.layer(layer)

    def commit(self, path: list[int]) -> None:
        if path:  # the root's row lies where it stays
            self.reserve(self.length + 2 + max(path))
            self._move(path)
        self.advance(1 + len(path))

    def load(self, kv: NDArray[Any]) -> None:
        self.reserve(self.length + kv.shape[1])
        super().load(kv)

    def copy_from(self, source: CacheSource, end: int) -> None:
        """Have whole pages of a source together with it, and copy what lies in front of them and behind."""
        if not isinstance(source, PagedKVCache):
            super().copy_from(source, end)
            return
        known = len(self.pages)
        if known * self._page == self.length:
            shared = source.pages[known : end // self._page]
            self._arena.pool.share(shared)
            self._append(shared)
            self.length += len(shared) * self._page
        self.reserve(end)
        for number, own in self._pieces(self.length, end):
            theirs = slice(self.length + number.start, self.length + number.stop)
            self._buffer[..., own, :] = source.rows_between(theirs)
        self.length = self.num_copied = end

    def prefix(self, length: int) -> FullKVCache:
        view = copy.copy(self)
        view._is_view = True
        view.roll_back(length)
        return view

    def clear(self) -> None:
        self.reserve(self._capacity)
        for _, rows in self._parts(0, self._capacity):
            rows.zero_()

    def roll_back(self, length: int) -> None:
        """Forget all positions from `length` on, and give back pages that none is left in.

        Where the last page has to be copied and none is free for that, forget its positions as well.
        """
        super().roll_back(length)
        if not self._is_view:
            self._arena.pool.give_back(self.pages, -(-length // self._page))
            self._own_last(length % self._page)

    def _own_last(self, num_entries: int) -> None:
        """Replace a last page that others share by one of its own, with copies of its entries, to write into.

        A full page stays shared: nothing more is written to it.
        """
        pool = self._arena.pool
        if num_entries == 0 or not pool.is_shared(self.pages[-1]):
            return
        kept = self.rows_between(slice((len(self.pages) - 1) * self._page, self.length))
        pool.give_back(self.pages, len(self.pages) - 1)
        try:
            self.reserve(self.length)
        except PagesError:
            super().roll_back(self.length - num_entries)
            return
        [(_, own)] = self._pieces(self.length - num_entries, self.length)
        self._buffer[..., own, :] = kept

    def _move(self, path: list[int]) -> None:
        """Bring the rows of the nodes `path` next to their root's."""
        if self._arena.move_rows is not None:
            self._arena.move_rows(self.slot, self.length, path, self._place)
        else:
            sources = [self._place(self.length + 1 + node) for node in path]
            targets = [self._place(self.length + 1 + number) for number in range(len(path))]
            self._buffer[..., targets, :] = self._buffer[..., sources, :]

    def _append(self, pages: list[int]) -> None:
        known = len(self.pages)
        self.pages.extend(pages)
        row = self._arena.pages.numbers[self.slot]
        if len(pages) == 1:
            row[known].fill_(pages[0])  # a launch, nobody waits for a copy
        elif pages:
            row[known : len(self.pages)] = torch.tensor(pages, dtype=torch.int32, device=row.device)

    def _place(self, entry: int) -> int:
        return self._lease.pages[entry // self._page] * self._page + entry % self._page

    def _pieces(self, start: int, end: int) -> Iterator[tuple[slice, slice]]:
        """Yield entries `[start, end)` page by page: which of them, and where they lie."""
        place = start
        while place < end:
            stop = min(end, (place // self._page + 1) * self._page)
            first = self.pages[place // self._page] * self._page + place % self._page
            yield slice(place - start, stop - start), slice(first, first + stop - place)
            place = stop

    def _parts(self, start: int, end: int) -> Iterator[tuple[slice, torch.Tensor]]:
        bits = self._bits()
        if start == end:
            yield slice(0, 0), bits[..., :0, :]
        for number, own in self._pieces(start, end):
            yield number, bits[..., own, :]

    def _joined(self, rows: torch.Tensor, positions: slice) -> torch.Tensor:
        """Entries of a pool's `rows [..., num_entries, row_width]`, in order."""
        parts = [rows[..., own, :] for _, own in self._pieces(positions.start, positions.stop)]
        return torch.cat(parts, dim=-2) if parts else rows[..., :0, :]

    def _grow(self, length: int) -> None:
        self.reserve(length)
        super()._grow(length)

    @property
    def _capacity(self) -> int:
        return self._max_length + MAX_TREE_NODES
