"""KV caches of a GPU in the host's memory: the GPU loads one layer while it computes with another."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from swiftbatch.worker.kernels.kernel_sizes import RING_LAYERS
from swiftbatch.worker.kv.cache_rows import CacheShape, ask_for_huge_pages
from swiftbatch.worker.kv.file_offload import FileRows
from swiftbatch.worker.kv.full_cache import FullKVCache, LayerStore
from swiftbatch.worker.kv.host_copies import CopyComputation, CopyEvent, CopyLane, CudaLane, computing_stream
from swiftbatch.worker.kv.kv_capacity import GB, MAX_TREE_NODES, MEMORY, KVRoom, KVRoomError
from swiftbatch.worker.kv.slot_arena import KVArena, SlotLease, SlotRows

NO_LAYER = -1


def offloaded_cache(shape: CacheShape, max_length: int, folder: str) -> FullKVCache:
    """Return an empty cache in `folder`, or in a GPU's pinned memory. Raises KVRoomError."""
    if shape.device.type == "cuda":
        return OffloadedArena(shape, 1, max_length, Streams.of(shape.device)).new_cache(max_length)
    rows = FileRows(shape, max_length + MAX_TREE_NODES, folder)
    return FullKVCache(shape, max_length, stores=(LayerStore(rows, range(shape.num_layers)),))


@dataclass(frozen=True)
class Streams:
    """Computing stream, and a copy lane for each direction."""

    computation: CopyComputation
    coming: CopyLane
    going: CopyLane

    @classmethod
    def of(cls, device: torch.device) -> Streams:
        return cls(computing_stream(device), CudaLane(device), CudaLane(device))

    def wait_for_copies(self) -> None:
        for lane in (self.coming, self.going):
            lane.mark().synchronize()


@dataclass(frozen=True)
class Visit:
    """Positions of one slot that a forward reads and writes."""

    slot: int
    rows: torch.Tensor  # [num_layers, capacity, num_parts, num_kv_heads, row_width], on the host
    num_final: int  # first positions that never change again, at most `end`
    end: int  # positions below it are read, except those that are written
    written: tuple[slice, ...] = ()


@dataclass
class _Held:
    """Final positions below `end` of a slot, on the device once the side's newest copy is done."""

    layer: int = NO_LAYER
    end: int = 0


@dataclass
class _RingLayer:
    """Room for one layer of all slots."""

    rows: torch.Tensor  # [num_slots, capacity, num_parts, num_kv_heads, row_width]
    held: list[_Held]
    arrival: CopyEvent | None = None


class OffloadedArena(KVArena):
    """Caches in pinned memory of the host, each as large as its job, and a ring of device layers as `buffer`.

    Layer n uses side `n % RING_LAYERS`. A forward calls `begin`, then `wait` and `leave` around each layer.
    """

    holds_all = False

    def __init__(self, shape: CacheShape, num_slots: int, max_length: int, streams: Streams) -> None:
        self.streams = streams
        self._visits: Sequence[Visit] = ()
        self._went: CopyEvent | None = None  # done when all written rows are on the host
        super().__init__(shape, num_slots, max_length)

    def new_cache(self, max_length: int) -> FullKVCache:
        """Make a cache as `KVArena` does. Raises KVRoomError also if the host has no room."""
        KVRoom(MEMORY, self.shape.bytes_per_position()).refuse_too_long(max_length)
        return super().new_cache(max_length)

    def rows(self, lease: SlotLease, max_length: int) -> RingRows:
        shape, num_entries = self.shape, max_length + MAX_TREE_NODES
        memory = PinnedMemory(num_entries * shape.bytes_per_position(), shape.device)
        weakref.finalize(lease, _release, memory, self.streams).atexit = False
        self.forget(lease.slot, 0)
        size = (shape.num_layers, num_entries, shape.num_parts, shape.num_kv_heads, shape.row_width)
        return RingRows(self, lease, memory.bytes.view(shape.row_dtype).view(size))

    def begin(self, visits: Sequence[Visit]) -> None:
        """Start to copy the first layers for a forward's rows; each slot appears once."""
        self._visits = visits
        self.streams.coming.follow(self.streams.computation.record_event())  # the forward may still read the old rows
        for layer in range(len(self._sides)):
            self._bring(layer, visits)

    def wait(self, layer: int) -> None:
        self.streams.computation.wait_event(self._side(layer).arrival)

    def leave(self, layer: int) -> None:
        """Copy a layer's new rows to the host, and start to copy the next layer into this side of the ring."""
        side, going = self._side(layer), self.streams.going
        going.follow(self.streams.computation.record_event())
        for visit in self._visits:
            for rows in visit.written:
                going.copy(visit.rows[layer, rows], side.rows[visit.slot, rows])
        self._went = going.mark()
        following = layer + len(self._sides)
        if following < self.shape.num_layers:
            self._bring(following, self._visits)
        elif len(self._sides) < self.shape.num_layers:
            self._bring(layer % len(self._sides), self._visits)

    def show(self, layer: int, visit: Visit) -> torch.Tensor:
        """Return a slot's layer `[num_parts, num_kv_heads, capacity, row_width]`, valid until the next call."""
        self.streams.coming.follow(self.streams.computation.record_event())
        self._bring(layer, [visit])
        following = (layer + 1) % self.shape.num_layers
        if self._side(following) is not self._side(layer):
            self._bring(following, [visit])
        self.wait(layer)
        return self.buffer[layer % len(self._sides), :, visit.slot]

    def forget(self, slot: int, length: int) -> None:
        for side in self._sides:
            side.held[slot].end = min(side.held[slot].end, length)

    def settle(self) -> None:
        """Return once all rows that forwards wrote are on the host; thread-safe."""
        if self._went is not None:
            self._went.synchronize()

    def _side(self, layer: int) -> _RingLayer:
        return self._sides[layer % len(self._sides)]

    def _bring(self, layer: int, visits: Sequence[Visit]) -> None:
        side, coming = self._side(layer), self.streams.coming
        if self._went is not None:
            coming.follow(self._went)  # by then the side is free and the host is up to date
        for visit in visits:
            held = side.held[visit.slot]
            missing = slice(min(held.end, visit.num_final) if held.layer == layer else 0, visit.end)
            if missing.start < missing.stop:
                coming.copy(side.rows[visit.slot, missing], visit.rows[layer, missing])
            held.layer, held.end = layer, visit.num_final
        side.arrival = coming.mark()

    def _allocate(self) -> torch.Tensor:
        """Return sides `[num_sides, num_parts, num_slots, num_kv_heads, capacity, row_width]`."""
        shape = self.shape
        num_sides = min(RING_LAYERS, shape.num_layers)
        size = (num_sides, self.num_slots, self.capacity, shape.num_parts, shape.num_kv_heads, shape.row_width)
        rows = torch.empty(size, dtype=shape.row_dtype, device=shape.device)
        self._sides = [_RingLayer(side, [_Held() for _ in range(self.num_slots)]) for side in rows]
        return rows.permute(0, 3, 1, 4, 2, 5)


class PinnedMemory:
    """Pinned memory of exact size; torch's own tensors round up to a power of two."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate the memory. Raises KVRoomError if the system refuses."""
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)  # [num_bytes]
        ask_for_huge_pages(self.bytes)
        self._is_pinned = False
        if device.type == "cuda":
            self._pin(device)

    def release(self) -> None:
        """Unpin the memory; no copy may be under way."""
        if self._is_pinned:
            self._is_pinned = False
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr()))

    def _pin(self, device: torch.device) -> None:
        error = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.nbytes, 0)
        if int(error) != 0:
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)  # clears CUDA's stored error, which the next launch would raise
            raise KVRoomError(
                f"no pinned memory for a cache of {self.bytes.nbytes / GB:,.2f} GB: CUDA error {int(error)}; "
                "use fewer --slots or max_tokens, or a machine with more memory"
            )
        self._is_pinned = True


def _release(memory: PinnedMemory, streams: Streams) -> None:
    streams.wait_for_copies()
    streams.computation.record_event().synchronize()  # kernels of a round read the host's memory directly
    memory.release()


class RingRows(SlotRows):
    """Rows on the host; forwards copy each layer of them to their slot in the ring.

    Reads wait for new rows to reach the host, writes for all copies.
    """

    holds_all = False

    def __init__(self, arena: OffloadedArena, lease: SlotLease, host: torch.Tensor) -> None:
        super().__init__(arena, lease, host.permute(0, 2, 3, 1, 4))
        self._ring, self._streams, self.host = arena, arena.streams, host

    def visit(self, first_entry: int, end: int, length: int) -> Visit:
        num_final = min(length, first_entry)
        return Visit(self.slot, self.host, num_final, first_entry, (slice(first_entry, end),))

    def layer(self, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._shown(index, length, length)

    def stored(self, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._ring.settle()
        return super().stored(index, length)

    def write(
        self, layer: int, first_entry: int, key: torch.Tensor, value: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._streams.wait_for_copies()
        self._put(layer, first_entry, key, value)
        self._ring.forget(self.slot, first_entry)
        return self._shown(layer, max(first_entry + key.shape[1], length), length)

    def move(self, root: int, path: list[int]) -> None:
        self._ring.settle()
        super().move(root, path)

    def kv(self, start: int, end: int) -> NDArray[Any]:
        self._ring.settle()
        return super().kv(start, end)

    def load(self, start: int, kv: NDArray[Any]) -> None:
        self._streams.wait_for_copies()
        self._ring.forget(self.slot, start)
        super().load(start, kv)

    @contextlib.contextmanager
    def restored(self, start: int, end: int) -> Iterator[None]:
        self._ring.settle()
        try:
            with super().restored(start, end):
                try:
                    yield
                finally:
                    self._streams.wait_for_copies()
        finally:
            self._ring.forget(self.slot, start)

    def clear(self) -> None:
        self._streams.wait_for_copies()
        self._ring.forget(self.slot, 0)
        super().clear()

    def _shown(self, index: int, end: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        visit = Visit(self.slot, self.host, length, end)
        parts = self._ring.show(index, visit)[:, :, : self.buffer.shape[-2]]
        return parts[0], parts[-1]
