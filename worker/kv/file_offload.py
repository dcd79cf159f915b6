"""KV caches of a CPU in a file: one layer is read while the model computes with another.

The file is written through a memory map and read by direct I/O, which took an eighth of the CPU time of copying.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from swiftbatch.worker.kv.cache_rows import CacheRows, CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache, LayerStore
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES, KVRoomError

BLOCK_POSITIONS = 1024  # so many rows fill whole memory pages for any head size, as direct reads need


def offloaded_cache(shape: CacheShape, max_length: int, folder: str) -> FullKVCache:
    """Return an empty cache in `folder`. Raises KVRoomError."""
    rows = FileRows(shape, max_length + MAX_TREE_NODES, folder)
    return FullKVCache(shape, max_length, stores=(LayerStore(rows, range(shape.num_layers)),))


class FileHost:
    """Nameless file, so that a killed process leaves nothing; all its space is allocated at the start."""

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

    def memory_of_a_layer(self) -> torch.Tensor:
        """Return memory `[num_parts, num_kv_heads, capacity, row_width]`, aligned as direct reads need it."""
        layer = self.rows[0]
        num_bytes = layer.numel() * layer.element_size()
        memory = torch.empty(num_bytes + mmap.PAGESIZE, dtype=torch.uint8)
        aligned = memory[-memory.data_ptr() % mmap.PAGESIZE :][:num_bytes]
        return aligned.view(layer.dtype).view(layer.shape)

    def flush(self, end: int) -> None:
        """Write positions below `end` to disk, so that direct reads find them, and drop them from the page cache."""
        os.fdatasync(self._fd)
        for layer in range(len(self.rows)):
            self.give_back(layer, end)

    def load(self, layer: int, target: torch.Tensor, end: int) -> None:
        """Read a layer's whole blocks below `end` into `target`."""
        runs = target.flatten(0, 1).view(torch.uint8).flatten(1).numpy()  # [num_parts * num_kv_heads, run_bytes]
        num_bytes = end * self._row_bytes
        for run, offset in zip(runs, self._offsets(layer), strict=True):
            done = 0
            while done < num_bytes:
                done += os.preadv(self._fd, [run[done:num_bytes]], offset + done)
        self.give_back(layer, end)

    def give_back(self, layer: int, end: int) -> None:
        """Drop a layer's positions below `end` from memory, except the newest block of them."""
        num_bytes = (end - BLOCK_POSITIONS) * self._row_bytes  # checkpoints and partial caches read the newest rows
        for offset in self._offsets(layer) if num_bytes > 0 else ():
            self._map.madvise(mmap.MADV_DONTNEED, offset, num_bytes)
            os.posix_fadvise(self._fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def _offsets(self, layer: int) -> range:
        num_runs = self.rows.shape[1] * self.rows.shape[2]
        first = layer * num_runs * self._run_bytes
        return range(first, first + num_runs * self._run_bytes, self._run_bytes)


@dataclass
class _LoadedLayer:
    """One of two layers in memory: it has positions below `end` of `layer` once `arrival` is done."""

    rows: torch.Tensor  # [num_parts, num_kv_heads, capacity, row_width]
    layer: int = -1
    end: int = 0
    arrival: Future[None] | None = None

    def holds(self, layer: int, length: int) -> bool:
        """Return whether nearly all of a layer's first `length` positions are in memory or being read."""
        return self.layer == layer and length - self.end < 2 * BLOCK_POSITIONS


class FileRows(CacheRows):
    """Rows in a file; `layer` and `write` bring layers into memory, in any order, and the next one ahead."""

    comes_by_layer = True

    def __init__(self, shape: CacheShape, num_entries: int, folder: str) -> None:
        self.host = FileHost(shape, num_entries + -num_entries % BLOCK_POSITIONS, folder)
        self._used, self._coming = (_LoadedLayer(self.host.memory_of_a_layer()) for _ in range(2))
        self._flushed = 0  # positions below it can be read
        self._thread = ThreadPoolExecutor(1, "kv-offload")
        super().__init__(shape, self.host.rows[..., :num_entries, :])

    def layer(self, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._forget(length)  # needed after a rollback, or another view's rows
        return self._taken(index, length, length, length)

    def stored(self, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        # since callers read layer by layer, this frees the layer before
        self.host.give_back((index - 1) % len(self.buffer), _whole_blocks(length))
        return super().stored(index, length)

    def write(
        self, layer: int, first_entry: int, key: torch.Tensor, value: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._forget(first_entry)  # needed after a rollback, or another view's rows
        self._put(layer, first_entry, key, value)
        return self._taken(layer, length, first_entry, first_entry + key.shape[1])

    def keep(self, layer: int, first_entry: int, end: int) -> None:
        """Store the rows that were written to entries `[first_entry, end)` of the result of `layer`."""
        self.buffer[layer, ..., first_entry:end, :] = self._used.rows[..., first_entry:end, :]

    def load(self, start: int, kv: NDArray[Any]) -> None:
        self._forget(start)
        super().load(start, kv)
        self.host.flush(_whole_blocks(start + kv.shape[1]))

    def clear(self) -> None:
        for rows in self.host.rows:
            rows.zero_()
            self.host.flush(rows.shape[-2])
        self._forget(0)

    def _taken(self, layer: int, length: int, first_entry: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values below `end`, in memory; rows from `first_entry` on are copied again."""
        if not self._used.holds(layer, length):
            if not self._coming.holds(layer, length):
                self._fetch(layer, length)
            self._used, self._coming = self._coming, self._used
        following = (layer + 1) % len(self.host.rows)
        if not self._coming.holds(following, length):
            self._fetch(following, length)  # starts before the wait, to keep the disk busy
        used = self._used
        assert used.arrival is not None
        used.arrival.result()
        start = min(used.end, first_entry)
        used.rows[:, :, start:end] = self.host.rows[layer, :, :, start:end]
        return used.rows[0], used.rows[-1]

    def _forget(self, length: int) -> None:
        """Forget loaded positions from `length` on, because they will change."""
        self._flushed = min(self._flushed, length)
        for side in (self._used, self._coming):
            if side.end > length:
                side.layer = -1

    def _fetch(self, layer: int, length: int) -> None:
        side, end = self._coming, _whole_blocks(length)
        side.layer, side.end = layer, end
        side.arrival = self._thread.submit(_bring, self.host, layer, side.rows, end, end > self._flushed)
        self._flushed = max(self._flushed, end)


def _bring(host: FileHost, layer: int, rows: torch.Tensor, end: int, must_flush: bool) -> None:
    if must_flush:
        host.flush(end)
    host.load(layer, rows, end)


def _whole_blocks(length: int) -> int:
    return length // BLOCK_POSITIONS * BLOCK_POSITIONS
