"""KV caches of all jobs on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache, LayerStore
from swiftbatch.worker.kv.gpu_memory_plan import slot_capacity
from swiftbatch.worker.kv.host_copies import Staging
from swiftbatch.worker.kv.kv_capacity import GB, MAX_TREE_NODES, PoolSize, TooLongError
from swiftbatch.worker.kv.sliding_window_cache import Window
from swiftbatch.worker.kv.slot_rows import PagedRows, SlotBuffer, SlotLease, SlotLeases

if TYPE_CHECKING:
    from swiftbatch.worker.kernels.cuda.cuda_recurrence import StateBuffers
    from swiftbatch.worker.kv.recurrent_arena import StateSlots


class KVArena(SlotBuffer):
    """Memory of all caches on a GPU, with one capacity for the whole run.

    Layers with a window have a pool of their own if they forget positions. Both pools number entries alike, so kernels
    read the same blocks in the same order.
    """

    holds_all = True  # rows can move between entries
    holds_engine = False  # True: the plan has room for an engine that is only tried

    def __init__(
        self,
        shape: CacheShape,
        num_slots: int,
        max_length: int,
        pool: PoolSize | None = None,
        staging: Staging | None = None,
    ) -> None:
        self.pool_size = pool
        self.num_drafted = num_slots  # drafts have room for so many sequences
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
        self.leases = SlotLeases(num_slots)

    @property
    def longest_job(self) -> int:
        return self.capacity - MAX_TREE_NODES

    @property
    def states(self) -> StateBuffers | None:
        return None if self._states is None else self._states.states

    def num_pages_for(self, caches: Iterable[FullKVCache]) -> tuple[int | None, int | None]:
        """Return how many pages and window pages these caches may take, or None for a pool that does not exist."""
        held = list(caches)
        whole = None if self.pages is None else self.num_free_pages + sum(len(cache.pages) for cache in held)
        if self.windowed is None:
            return whole, None
        return whole, self.windowed.num_free_pages + sum(cache.num_window_pages for cache in held)

    @contextlib.contextmanager
    def moving_together(self) -> Iterator[None]:
        """Collect moves of rows, and make them all at once on exit."""
        with contextlib.ExitStack() as stack:
            for slots in (self, self.windowed):
                if slots is not None and slots.move_rows is not None:
                    stack.enter_context(slots.move_rows.together())
            yield

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
            pages = PagedRows(slots, lease, max_length + MAX_TREE_NODES)
            window = Window(widest + BLOCK, len(slots.layers), pages.give_back, slots.page)
            stores.append(LayerStore(pages, slots.layers, window))
        states = None if self._states is None else self._states.of(rows)
        return FullKVCache(self.shape, max_length, stores=stores, states=states)

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
