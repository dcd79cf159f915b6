"""Slots of a GPU worker whose caches lie in pinned memory of the host, each as large as its own job."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from numpy.typing import NDArray

from swiftbatch.worker.caches.cache_room import MEMORY, KVRoom
from swiftbatch.worker.caches.full_cache import MAX_TREE_NODES, CacheShape, FullKVCache
from swiftbatch.worker.caches.host_memory import PinnedMemory
from swiftbatch.worker.caches.layer_ring import LayerRing, Streams, Visit
from swiftbatch.worker.caches.slot_arena import ArenaKVCache, KVArena, SlotLease


class OffloadedArena(KVArena):
    """A `KVArena` whose buffer has two layers alone, those of a `LayerRing`."""

    holds_all = False

    def __init__(self, shape: CacheShape, num_slots: int, max_length: int, streams: Streams) -> None:
        """Slots for sequences of at most `max_length` positions. Memory for them is taken as they come."""
        self.streams = streams
        super().__init__(shape, num_slots, max_length)

    def new_cache(self, max_length: int) -> OffloadedSlotCache:
        """Make a cache as `KVArena` does. Raises KVRoomError also where the host has no room."""
        KVRoom(MEMORY, self.shape.bytes_per_position()).refuse_too_long(max_length)
        cache = super().new_cache(max_length)
        assert isinstance(cache, OffloadedSlotCache)
        return cache

    def _allocate(self) -> torch.Tensor:
        self.ring = LayerRing(self.shape, self.num_slots, self.capacity, self.streams)
        return self.ring.buffer

    def _cache(self, lease: SlotLease, max_length: int) -> OffloadedSlotCache:
        shape, num_entries = self.shape, max_length + MAX_TREE_NODES
        memory = PinnedMemory(num_entries * shape.bytes_per_position(), shape.device)
        weakref.finalize(lease, _release, memory, self.streams).atexit = False
        self.ring.forget(lease.slot, 0)
        size = (shape.num_layers, num_entries, shape.num_parts, shape.num_kv_heads, shape.row_width)
        return OffloadedSlotCache(self, lease, max_length, memory.bytes.view(shape.row_dtype).view(size))


def _release(memory: PinnedMemory, streams: Streams) -> None:
    streams.wait_for_copies()
    streams.computation.record_event().synchronize()  # rounds read it by themselves
    memory.release()


class OffloadedSlotCache(ArenaKVCache):
    """A `FullKVCache` whose rows are kept on the host; forwards bring its layers to its slot of the ring.

    Whoever reads rows here waits until the newest have come home, and whoever changes those that may be on their way to
    the device, until none is. Accepted rows are not: of what comes ahead of a step, only final positions are used.
    """

    comes_by_layer = True

    def __init__(self, arena: OffloadedArena, lease: SlotLease, max_length: int, rows: torch.Tensor) -> None:
        """`rows [num_layers, capacity, num_parts, num_kv_heads, row_width]`."""
        self._ring, self._rows, self._streams = arena.ring, rows, arena.streams
        super().__init__(arena, lease, max_length, rows.permute(0, 2, 3, 1, 4), None)

    def visit(self, first_entry: int, end: int) -> Visit:
        """A forward that writes these entries, behind all those before."""
        num_final = min(self.length, first_entry)
        return Visit(self.slot, self._rows, num_final, first_entry, (slice(first_entry, end),))

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._shown(index, self.length)

    def stored(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._ring.settle()
        return super().stored(index)

    def write(
        self, layer: int, first_entry: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._streams.wait_for_copies()
        end = first_entry + key.shape[1]
        for part, rows in enumerate((key, value)[: self.shape.num_parts]):
            self._buffer[layer, part, :, first_entry:end] = self.shape.kept(rows)
        self._ring.forget(self.slot, first_entry)
        return self._shown(layer, max(end, self.length))

    def keep(self, layer: int, first_entry: int, end: int) -> None:
        self._ring.keep(layer, [self.visit(first_entry, end)])

    def commit(self, path: list[int]) -> None:
        self._ring.settle()
        super().commit(path)

    def kv(self, start: int, end: int) -> NDArray[Any]:
        self._ring.settle()
        return super().kv(start, end)

    def load(self, kv: NDArray[Any]) -> None:
        self._streams.wait_for_copies()
        self._ring.forget(self.slot, self.length)
        super().load(kv)

    @contextlib.contextmanager
    def replayed(self, length: int, num_positions: int = 1) -> Iterator[FullKVCache]:
        self._ring.settle()
        with super().replayed(length, num_positions) as view:
            yield view
            self._streams.wait_for_copies()
        self._ring.forget(self.slot, length)

    def clear(self) -> None:
        self._streams.wait_for_copies()
        self._ring.forget(self.slot, 0)
        super().clear()

    def _shown(self, index: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        visit = Visit(self.slot, self._rows, self.length, end)
        parts = self._ring.show(index, visit)[:, :, : self._buffer.shape[-2]]
        return parts[0], parts[-1]
