"""Places for a key-value cache outside the device: a file for a CPU, pinned memory for a GPU.

The file is written through a map and read by direct I/O, with an eighth of the CPU time of copying (measured).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from swiftbatch.worker.kv.full_cache import CacheShape
from swiftbatch.worker.kv.host_copies import CudaLane
from swiftbatch.worker.kv.huge_pages import ask_for_huge_pages
from swiftbatch.worker.kv.kv_capacity import GB, KVRoomError

BLOCK_POSITIONS = 1024  # so many rows fill whole memory pages for any head size, as direct reads need


class CacheHost(Protocol):
    """Memory of rows `[num_layers, 2, num_kv_heads, capacity, head_dim]`, which must not change while loaded."""

    rows: torch.Tensor

    def device_rows(self) -> torch.Tensor:
        """Allocate one layer on the device, `[num_parts, num_kv_heads, capacity, head_dim]`."""

    def loading(self, layer: int, target: torch.Tensor, end: int) -> Callable[[], None]:
        """Return a call, for another thread, that loads a layer's whole blocks below `end` into `target`."""

    def flush(self, end: int) -> None:
        """Make positions below `end` readable, and drop them from the page cache."""

    def give_back(self, layer: int, end: int) -> None:
        """Drop a layer's positions below `end` from memory, except the newest."""


class FileHost:
    """Nameless file, so a killed process leaves nothing; its space is allocated at once."""

    def __init__(self, shape: CacheShape, capacity: int, folder: str) -> None:
        """`capacity` is in whole blocks. Raises KVRoomError if the folder lacks space."""
        size = (shape.num_layers, shape.num_parts, shape.num_kv_heads, capacity, shape.row_width)
        num_bytes = capacity * shape.bytes_per_position()
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            self._fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._fd)
        try:
            os.posix_fallocate(self._fd, 0, num_bytes)
        except OSError as error:
            raise KVRoomError(
                f"no room for a cache of {num_bytes / 1e9:.2f} GB in {folder}: {error.strerror}"
            ) from None
        self._map = mmap.mmap(self._fd, num_bytes)
        self.rows = torch.frombuffer(self._map, dtype=shape.row_dtype).view(size)
        self._row_bytes = shape.row_width * shape.row_dtype.itemsize
        self._run_bytes = capacity * self._row_bytes  # keys or values of one head in one layer
        with contextlib.suppress(OSError):  # without direct reads, as in tmpfs, the page cache is used
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | os.O_DIRECT)

    def device_rows(self) -> torch.Tensor:
        layer = self.rows[0]
        num_bytes = layer.numel() * layer.element_size()
        memory = torch.empty(num_bytes + mmap.PAGESIZE, dtype=torch.uint8)
        aligned = memory[-memory.data_ptr() % mmap.PAGESIZE :][:num_bytes]  # as direct reads need it
        return aligned.view(layer.dtype).view(layer.shape)

    def loading(self, layer: int, target: torch.Tensor, end: int) -> Callable[[], None]:
        return functools.partial(self._load, layer, target, end)

    def flush(self, end: int) -> None:
        os.fdatasync(self._fd)
        for layer in range(len(self.rows)):
            self.give_back(layer, end)

    def _load(self, layer: int, target: torch.Tensor, end: int) -> None:
        runs = target.flatten(0, 1).view(torch.uint8).flatten(1).numpy()  # [num_parts * num_kv_heads, run_bytes]
        num_bytes = end * self._row_bytes
        for run, offset in zip(runs, self._offsets(layer), strict=True):
            done = 0
            while done < num_bytes:
                done += os.preadv(self._fd, [run[done:num_bytes]], offset + done)
        self.give_back(layer, end)

    def give_back(self, layer: int, end: int) -> None:
        num_bytes = (end - BLOCK_POSITIONS) * self._row_bytes  # checkpoints and partial caches read the newest rows
        for offset in self._offsets(layer) if num_bytes > 0 else ():
            self._map.madvise(mmap.MADV_DONTNEED, offset, num_bytes)
            os.posix_fadvise(self._fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def _offsets(self, layer: int) -> range:
        num_runs = self.rows.shape[1] * self.rows.shape[2]
        first = layer * num_runs * self._run_bytes
        return range(first, first + num_runs * self._run_bytes, self._run_bytes)


class PinnedHost:
    """Pinned memory, copied to the GPU on a stream of its own."""

    def __init__(self, shape: CacheShape, capacity: int) -> None:
        size = (shape.num_layers, 2, shape.num_kv_heads, capacity, shape.head_dim)
        self.rows = torch.empty(size, dtype=shape.dtype, pin_memory=True)
        self._device = shape.device
        self._lane = CudaLane(shape.device)

    def device_rows(self) -> torch.Tensor:
        return torch.empty_like(self.rows[0], device=self._device)

    def loading(self, layer: int, target: torch.Tensor, end: int) -> Callable[[], None]:
        # by then the target's previous layer has been read
        is_free = torch.cuda.current_stream(self._device).record_event()
        return functools.partial(self._load, layer, target, end, is_free)

    def flush(self, end: int) -> None:
        """Do nothing: there is no other copy."""

    def give_back(self, layer: int, end: int) -> None:
        """Do nothing."""

    def _load(self, layer: int, target: torch.Tensor, end: int, is_free: torch.cuda.Event) -> None:
        self._lane.follow(is_free)
        for run, source in zip(target.flatten(0, 1), self.rows[layer].flatten(0, 1), strict=True):
            self._lane.copy(run[:end], source[:end])
        self._lane.mark().synchronize()


class PinnedMemory:
    """Pinned memory of exact size; torch's own tensors round up to a power of two."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises KVRoomError if the system refuses."""
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
