"""All key-value caches of a GPU worker in one buffer that is allocated at start-up, a slot for each job."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.worker.caches.cache_room import GB, KVRoomError, TooLongError
from swiftbatch.worker.caches.full_cache import MAX_TREE_NODES, CacheShape, CacheSource, FullKVCache
from swiftbatch.worker.caches.host_copies import Staging
from swiftbatch.worker.caches.memory.memory_plan import slot_capacity
from swiftbatch.worker.caches.memory.page_counts import PoolSize

if TYPE_CHECKING:
    from swiftbatch.worker.caches.paged_arena import PagedArena
    from swiftbatch.worker.kernels.cuda.cuda_row_table import PageTable
    from swiftbatch.worker.kernels.cuda.states.state_buffers import StateBuffers

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

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody has."""
        return 0

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
