"""Rows of all jobs on a GPU, in slots of one buffer or in pages of a pool."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.worker.kernels.cuda.cuda_row_table import PageTable
from swiftbatch.worker.kernels.cuda.device_caches import DeviceCaches
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kernels.rank_shares import Rank, kv_heads_of
from swiftbatch.worker.kv.cache_rows import NO_PAGE, CacheRows, CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache, LayerStore
from swiftbatch.worker.kv.gpu_memory_plan import slot_capacity
from swiftbatch.worker.kv.host_copies import Staging
from swiftbatch.worker.kv.kv_capacity import (
    GB,
    MAX_TREE_NODES,
    PagesError,
    PoolSize,
    TooLongError,
    pages_of,
)
from swiftbatch.worker.kv.sliding_windows import Window
from swiftbatch.worker.kv.slot_leases import PagePool, SlotLease, SlotLeases

if TYPE_CHECKING:
    from swiftbatch.worker.kernels.cuda.cuda_recurrence import StateBuffers
    from swiftbatch.worker.kv.recurrent_arena import StateSlots


Place = Callable[[int], int]
"""Map from a slot's entry to its place in a pool."""


class MoveRows(Protocol):
    """Moves accepted rows next to their root, as `keep_path` does."""

    def __call__(self, slot: int, root: int, path: Sequence[int], place: Place | None = None) -> None:
        """Move a tree's nodes `path` next to entry `root` of a slot; `place` maps entries to a pool."""

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Collect moves, and make them all at once on exit."""


class SlotBuffer:
    """Rows of some layers of all slots: `buffer [num_layers, num_parts, num_slots, num_kv_heads, capacity, row_width]`.

    It never moves or grows, because graphs keep its address. With a `pool`, slots share `[num_layers, num_parts, 1,
    num_kv_heads, num_pages * page, row_width]`. The first sizes are those of `CacheShape.rows_size`.
    """

    pool: PagePool
    page = 0
    followers: Sequence[SlotBuffer] = ()  # of other GPUs, whose heads lie in the same pages
    num_copies = 1  # of each head of keys and values, on as many GPUs
    is_zero = False  # True: all zeros when a worker starts, so `clear` skips it

    def __init__(
        self,
        shape: CacheShape,
        layers: Sequence[int],
        num_slots: int,
        capacity: int,
        pool: PoolSize | None = None,
        staging: Staging | None = None,
    ) -> None:
        """Take `staging` for checkpoints, None on a CPU."""
        self.shape, self.layers, self.staging = shape, layers, staging
        self.own_shape = shape.of_layers(layers)
        self.num_slots, self.capacity = num_slots, capacity
        self.pages: PageTable | None = None  # None without a pool
        self.move_rows: MoveRows | None = None  # None: the tensors' own copies move rows
        if pool is not None:
            self.pool, self.num_pages, self.page = PagePool(pool.num_pages), pool.num_pages, pool.page
            size = (num_slots, pages_of(capacity - MAX_TREE_NODES, pool.page))
            self.pages = PageTable(torch.zeros(size, dtype=torch.int32, device=shape.device), pool.page)
        self.leases = SlotLeases(num_slots)
        self.buffer = self._allocate()

    @property
    def num_free_pages(self) -> int:
        return self.pool.num_free

    @property
    def place(self) -> tuple[torch.Tensor, PageTable]:
        assert self.pages is not None
        return self.buffer, self.pages

    def rows(self, lease: SlotLease, max_length: int) -> CacheRows:
        num_entries = max_length + MAX_TREE_NODES
        if self.pages is None:
            return SlotRows(self, lease, self.buffer[:, :, lease.slot, :, :num_entries])
        return (RankedRows if self.followers else PagedRows)(self, lease, num_entries)

    def _allocate(self) -> torch.Tensor:
        shape = self.shape
        num_slots, capacity = (self.num_slots, self.capacity) if self.pages is None else (1, self.num_pages * self.page)
        num_layers, num_parts, num_heads = self.own_shape.rows_size
        size = (num_layers, num_parts, num_slots, num_heads, capacity, shape.row_width)
        return torch.empty(size, dtype=shape.row_dtype, device=shape.device)


class SlotRows(CacheRows):
    """Rows of one slot."""

    holds_all = True

    def __init__(self, slots: SlotBuffer, lease: SlotLease, buffer: torch.Tensor) -> None:
        super().__init__(slots.own_shape, buffer)
        self._slots, self._lease, self.slot = slots, lease, lease.slot

    def move(self, root: int, path: list[int]) -> None:
        if self._slots.move_rows is None:
            super().move(root, path)
        else:
            self._slots.move_rows(self.slot, root, path)

    def to_host(self, rows: torch.Tensor) -> NDArray[Any]:
        return super().to_host(rows) if self._slots.staging is None else self._slots.staging.read(rows)

    def from_host(self, rows: torch.Tensor, kv: NDArray[Any]) -> None:
        if self._slots.staging is None:
            super().from_host(rows, kv)
        else:
            self._slots.staging.write(rows, kv)


class PagedRows(SlotRows):
    """Rows in pages of a pool, whose whole memory is their `buffer`.

    Sequences share full pages. Forgotten pages are `NO_PAGE`.
    """

    pages: list[int]
    page_table: PageTable

    def __init__(self, slots: SlotBuffer, lease: SlotLease, num_entries: int, leader: PagedRows | None = None) -> None:
        """Take the pages of a `leader`, whose rows are on another GPU."""
        assert slots.pages is not None
        super().__init__(slots, lease, slots.buffer[:, :, 0])
        self.page, self._num_entries = slots.page, num_entries
        self.pages = [] if leader is None else leader.pages
        self.page_table = slots.pages.of(self.slot)
        if leader is None:
            weakref.finalize(lease, slots.pool.give_back, self.pages)

    @property
    def capacity(self) -> int:
        return self._num_entries

    def reserve(self, end: int) -> None:
        """Have room for entries below `end`. Raises PagesError if the pool has no free page."""
        known = len(self.pages)
        if end > known * self.page and (num_missing := -(-min(end, self.capacity) // self.page) - known) > 0:
            self._append(self._slots.pool.take(num_missing))

    def cut(self, length: int) -> int:
        """Free the pages after `length`, and copy the last page if it is shared; return how many entries are left.

        If no page is free for the copy, forget the last page's positions as well.
        """
        pool, num_last = self._slots.pool, length % self.page
        pool.give_back(self.pages, -(-length // self.page))
        if num_last == 0 or not pool.is_shared(self.pages[-1]):
            return length
        kept = self._taken(slice(length - num_last, length))
        pool.give_back(self.pages, len(self.pages) - 1)
        try:
            self.reserve(length)
        except PagesError:
            return length - num_last
        self._put_back(length - num_last, kept)
        return length

    def give_back(self, start: int, end: int, first: int) -> None:
        """Free the pages of which all positions are forgotten."""
        self.pages.extend([NO_PAGE] * (end // self.page - len(self.pages)))
        numbers = slice(-(-start // self.page), end // self.page)
        lost = self.pages[numbers]
        self.pages[numbers] = [NO_PAGE] * len(lost)
        self._slots.pool.give_back(lost)

    def stored(self, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a copy of the layer, in order."""
        return self.stored_between(index, slice(0, min(self.capacity, len(self.pages) * self.page)), length)

    def stored_between(self, index: int, positions: slice, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        number, heads = self.shape.place(index)
        parts = self._joined(self.buffer[number][:, heads], positions)
        return parts[0], parts[-1]

    def between(self, positions: slice) -> torch.Tensor:
        return self._joined(self.buffer, positions)

    def move(self, root: int, path: list[int]) -> None:
        if self._slots.move_rows is not None:
            self._slots.move_rows(self.slot, root, path, self._place)
        else:
            sources = [self._place(root + 1 + node) for node in path]
            targets = [self._place(root + 1 + number) for number in range(len(path))]
            self.buffer[..., targets, :] = self.buffer[..., sources, :]

    def share(self, theirs: CacheRows, start: int, end: int) -> int:
        known = len(self.pages)
        if known * self.page != start or theirs.page != self.page:
            return start
        shared = theirs.pages[known : end // self.page]
        self._slots.pool.share(shared)
        self._append(list(shared))
        return start + len(shared) * self.page

    def clear(self) -> None:
        """Fill the whole capacity with zeros; the pages of window pools already are zero."""
        if self._slots.is_zero:
            return
        self.reserve(self.capacity)
        for _, rows in self.parts(0, self.capacity):
            rows.zero_()

    def _append(self, pages: list[int]) -> None:
        known = len(self.pages)
        self.pages.extend(pages)
        self._tell(known, pages)

    def _taken(self, positions: slice) -> list[torch.Tensor]:
        return [self.between(positions)]

    def _put_back(self, start: int, kept: list[torch.Tensor]) -> None:
        """Store entries of one page from `start` on."""
        [(_, own)] = self._pieces(start, start + kept[0].shape[-2])
        self.buffer[..., own, :] = kept[0]

    def _tell(self, known: int, pages: list[int]) -> None:
        """Write pages after the first `known` ones to the device."""
        if len(pages) == 1:
            self.page_table.numbers[known].fill_(pages[0])  # waits for no copy
        elif pages:  # copied without memory of the device, which may be full
            self.page_table.numbers[known : len(self.pages)].copy_(torch.tensor(pages, dtype=torch.int32))

    def _place(self, entry: int) -> int:
        return self.pages[entry // self.page] * self.page + entry % self.page

    def _pieces(self, start: int, end: int) -> Iterator[tuple[slice, slice]]:
        place = start
        while place < end:
            stop = min(end, (place // self.page + 1) * self.page)
            first = self._place(place)
            yield slice(place - start, stop - start), slice(first, first + stop - place)
            place = stop
        if start == end:
            yield slice(0, 0), slice(0, 0)

    def _joined(self, rows: torch.Tensor, positions: slice) -> torch.Tensor:
        """Return entries of `rows [..., num_entries, row_width]` in order, forgotten ones as zeros."""
        parts = [
            rows[..., own, :] if own.start >= 0 else torch.zeros_like(rows[..., : own.stop - own.start, :])
            for _, own in self._pieces(positions.start, positions.stop)
        ]
        return torch.cat(parts, dim=-2)


class RankedRows(PagedRows):
    """Rows whose heads are on several GPUs, in the same pages of each."""

    def __init__(self, slots: SlotBuffer, lease: SlotLease, num_entries: int) -> None:
        super().__init__(slots, lease, num_entries)
        self.ranks: list[PagedRows] = [PagedRows(each, lease, num_entries, self) for each in (slots, *slots.followers)]

    def between(self, positions: slice) -> torch.Tensor:
        device = self.buffer.device
        return torch.cat([each.between(positions).to(device) for each in self._by_head()], dim=2)

    def stored(self, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("no engine reads keys and values of several GPUs")

    def stored_between(self, index: int, positions: slice, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("no engine reads keys and values of several GPUs")

    def move(self, root: int, path: list[int]) -> None:
        for rank in self.ranks:
            rank.move(root, path)

    def copy(self, theirs: CacheRows, start: int, end: int) -> None:
        assert isinstance(theirs, RankedRows)
        for own, its in zip(self.ranks, theirs.ranks, strict=True):
            own.copy(its, start, end)

    @contextlib.contextmanager
    def restored(self, start: int, end: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for rank in self.ranks:
                stack.enter_context(rank.restored(start, end))
            yield

    def clear(self) -> None:
        if not self._slots.is_zero:
            self.reserve(self.capacity)
            for rank in self.ranks:
                rank.clear()

    def kv(self, start: int, end: int) -> NDArray[Any]:
        heads = [rank.kv(start, end) for rank in self._by_head()]
        whole = np.concatenate([each.reshape(*self._planes, -1, *each.shape[1:]) for each in heads], axis=2)
        return whole.reshape(-1, *whole.shape[3:])

    def load(self, start: int, kv: NDArray[Any]) -> None:
        ranks = self._by_head()
        parts = np.split(kv.reshape(*self._planes, -1, *kv.shape[1:]), len(ranks), axis=2)
        for number, rank in enumerate(self.ranks):
            own = parts[number * len(ranks) // len(self.ranks)]
            rank.load(start, own.reshape(-1, *own.shape[3:]))

    def _by_head(self) -> list[PagedRows]:
        """Return one rank for each of the different heads."""
        return self.ranks[:: self._slots.num_copies]

    @property
    def _planes(self) -> tuple[int, int]:
        return len(self._slots.layers), self.shape.num_parts

    def _taken(self, positions: slice) -> list[torch.Tensor]:
        return [rank.between(positions) for rank in self.ranks]

    def _put_back(self, start: int, kept: list[torch.Tensor]) -> None:
        for rank, own in zip(self.ranks, kept, strict=True):
            rank._put_back(start, [own])

    def _tell(self, known: int, pages: list[int]) -> None:
        for rank in self.ranks:
            rank._tell(known, pages)


class KVArena(SlotBuffer):
    """Memory of all caches on a GPU, with one capacity for the whole run.

    Layers with a window have a pool of their own if they forget positions. Both pools number entries alike, so kernels
    read the same blocks in the same order.
    """

    other_ranks: Sequence[KVArena] = ()
    holds_engine = False  # True: the plan has room for an engine that is only tried

    def __init__(
        self,
        shape: CacheShape,
        num_slots: int,
        max_length: int,
        pool: PoolSize | None = None,
        staging: Staging | None = None,
    ) -> None:
        self.pool_size, self.whole_shape = pool, shape
        self.windowed: SlotBuffer | None = None  # layers with a window, if these forget; `buffer` then lacks them
        layers, capacity = tuple(range(shape.num_layers)), slot_capacity(max_length)
        if pool is not None and pool.windows is not None:
            window_pool = PoolSize(pool.windows.num_pages, pool.page)
            windowed = tuple(each for each in layers if shape.windows[each])
            self.windowed = SlotBuffer(shape, windowed, num_slots, capacity, window_pool, staging)
            self.windowed.buffer.zero_()  # forwards are timed over these rows before any is written
            self.windowed.is_zero = True
            layers = tuple(each for each in layers if shape.windows[each] is None)
        super().__init__(shape, layers, num_slots, capacity, pool, staging)
        self._states: StateSlots | None = None
        if pool is not None and shape.recurrent is not None:
            # imported here because it needs Triton, which a CPU lacks
            from swiftbatch.worker.kv.recurrent_arena import StateSlots

            self._states = StateSlots(shape, shape.recurrent, num_slots)

    @classmethod
    def of_ranks(
        cls,
        shape: CacheShape,
        devices: Sequence[torch.device],
        num_slots: int,
        max_length: int,
        pool: PoolSize,
        stagings: Sequence[Staging | None],
    ) -> KVArena:
        """Return the first GPU's arena, which leads those of the others. `shape` is that of whole caches."""
        arenas = []
        for number, (device, staging) in enumerate(zip(devices, stagings, strict=True)):
            heads = kv_heads_of(shape.num_kv_heads, Rank(number, len(devices)))
            own = replace(shape, num_kv_heads=heads.stop - heads.start, device=device)
            arenas.append(cls(own, num_slots, max_length, pool, staging))
        arenas[0].lead(arenas[1:], shape)
        return arenas[0]

    @property
    def longest_job(self) -> int:
        return self.capacity - MAX_TREE_NODES

    @property
    def states(self) -> StateBuffers | None:
        return None if self._states is None else self._states.states

    @property
    def on_device(self) -> DeviceCaches:
        windowed = None if self.windowed is None else self.windowed.place
        return DeviceCaches(self.buffer, self.capacity, self.pages, windowed, self.states, self.shape.stripes)

    @contextlib.contextmanager
    def moving_together(self) -> Iterator[None]:
        """Collect moves of rows, and make them all at once on exit."""
        with contextlib.ExitStack() as stack:
            for arena in (self, *self.other_ranks):
                for slots in (arena, arena.windowed):
                    if slots is not None and slots.move_rows is not None:
                        stack.enter_context(slots.move_rows.together())
            yield

    def lead(self, others: Sequence[KVArena], shape: CacheShape) -> None:
        """Have the heads of other ranks in the same pages. `shape` is that of all ranks' caches together."""
        self.whole_shape, self.other_ranks = shape, others
        num_copies = (1 + len(others)) * self.shape.num_kv_heads // shape.num_kv_heads
        windowed = [each.windowed for each in others if each.windowed is not None]
        for slots, followers in ((self, others), (self.windowed, windowed)):
            if slots is not None:
                slots.followers, slots.num_copies = followers, num_copies
        if self._states is not None:
            self._states.followers = [each._states for each in others if each._states is not None]

    def new_cache(self, max_length: int) -> FullKVCache:
        """Return an empty cache in a free slot, which is free again once the cache and its views are gone.

        Raises TooLongError, or KVRoomError if no slot is free.
        """
        lease = self._lease(max_length)
        rows = self.rows(lease, max_length)
        stores = [LayerStore(rows, self.layers)]
        if (slots := self.windowed) is not None:
            widest = max(size or 0 for size in self.shape.windows)
            # kernels read the window of a block's first row
            pages = slots.rows(lease, max_length)
            share = slots.own_shape.bytes_per_position() / self.shape.bytes_per_position()
            window = Window(widest + BLOCK, share, pages)
            stores.append(LayerStore(pages, slots.layers, window))
        states = None if self._states is None else self._states.of(rows)
        return FullKVCache(self.whole_shape, max_length, stores=stores, states=states)

    def _lease(self, max_length: int) -> SlotLease:
        if max_length > self.longest_job:
            raise TooLongError(
                f"max_tokens: a job of {max_length:,} positions is longer than a slot of this worker's GPU, "
                f"{self.longest_job:,} positions in {self.capacity * self.shape.bytes_per_position() / GB:,.2f} GB; "
                "use fewer max_tokens, or once the run has ended resume --retry-failed, which makes slots for its "
                "longest job"
            )
        return self.leases.take(
            f"no slot for a job of {max_length:,} positions: all {self.num_slots} of this worker's GPU are taken, "
            f"{self.buffer.nbytes / GB:,.2f} GB; use more --slots or --workers"
        )
