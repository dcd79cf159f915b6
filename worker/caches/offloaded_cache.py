"""Full key-value cache that lives outside the device: two layers of it are there, the next comes while one is used.

Whole layers are brought in, so attention runs the same call over the same contiguous keys as with the cache on the
device, and gives the same bits. Committed positions never change, so whole blocks of them are loaded ahead; the newest
rows and the tree are copied when their layer is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from swiftbatch.worker.caches.full_cache import MAX_TREE_NODES, CacheShape, FullKVCache
from swiftbatch.worker.caches.host_memory import BLOCK_POSITIONS, CacheHost, FileHost, PinnedHost


class OffloadedKVCache(FullKVCache):
    """A `FullKVCache` whose buffer is a host's; `layer` and `write` bring layers to the device, in any order."""

    def __init__(self, shape: CacheShape, max_length: int, folder: str) -> None:
        """Keep it in `folder`, or on a GPU in pinned memory. Raises KVRoomError where there is no room."""
        num_entries = max_length + MAX_TREE_NODES
        capacity = num_entries + -num_entries % BLOCK_POSITIONS
        is_gpu = shape.device.type == "cuda"
        self._host: CacheHost = PinnedHost(shape, capacity) if is_gpu else FileHost(shape, capacity, folder)
        self._layers = LayerStream(self._host)
        super().__init__(shape, max_length, self._host.rows[..., :num_entries, :])

    comes_by_layer = True

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._layers.forget(self.length)  # it was rolled back, or another view of it was ahead
        parts = self._layers.take(index, self.length, self.length, self.length)
        return parts[0], parts[-1]

    def stored(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._host.give_back((index - 1) % len(self._buffer), _whole_blocks(self.length))  # one may read layer by layer
        return super().stored(index)

    def write(
        self, layer: int, first_entry: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = first_entry + key.shape[1]
        self._layers.forget(first_entry)  # it was rolled back, or another view of it was ahead
        for part, rows in enumerate((key, value)[: self.shape.num_parts]):
            self._buffer[layer, part, :, first_entry:end] = self.shape.kept(rows)
        parts = self._layers.take(layer, self.length, first_entry, end)
        return parts[0], parts[-1]

    def keep(self, layer: int, first_entry: int, end: int) -> None:
        self._buffer[layer, ..., first_entry:end, :] = self._layers.used[..., first_entry:end, :]

    def load(self, kv: NDArray[Any]) -> None:
        self._layers.forget(self.length)
        super().load(kv)
        self._host.flush(_whole_blocks(self.length))

    def clear(self) -> None:
        for rows in self._host.rows:
            rows.zero_()
            self._host.flush(rows.shape[-2])
        self._layers.forget(0)


@dataclass
class _Side:
    """One of the two layers on the device: it holds the positions below `end` of `layer` when `arrival` is done."""

    rows: torch.Tensor  # [num_parts, num_kv_heads, capacity, head_dim]
    layer: int = -1
    end: int = 0
    arrival: Future[None] | None = None

    def holds(self, layer: int, length: int) -> bool:
        """Tell whether all but some newest of the first `length` positions of a layer are there, or coming."""
        return self.layer == layer and length - self.end < 2 * BLOCK_POSITIONS


class LayerStream:
    """Brings layers of a host to the device, one ahead of what is used. Views of one cache share it."""

    def __init__(self, host: CacheHost) -> None:
        self._host = host
        self._used, self._coming = _Side(host.device_rows()), _Side(host.device_rows())
        self._flushed = 0  # positions below it can be read
        self._thread = ThreadPoolExecutor(1, "kv-offload")

    def take(self, layer: int, length: int, first_entry: int, end: int) -> torch.Tensor:
        """A layer on the device, `[num_parts, num_kv_heads, capacity, head_dim]`, with all rows below `end`.

        `length` positions are committed. Rows from `first_entry` on are always copied anew.
        """
        if not self._used.holds(layer, length):
            if not self._coming.holds(layer, length):
                self._fetch(layer, length)
            self._used, self._coming = self._coming, self._used
        following = (layer + 1) % len(self._host.rows)
        if not self._coming.holds(following, length):
            self._fetch(following, length)  # before the wait, so that the disk goes on at once
        used = self._used
        assert used.arrival is not None
        used.arrival.result()
        start = min(used.end, first_entry)
        used.rows[:, :, start:end] = self._host.rows[layer, :, :, start:end]
        return used.rows

    @property
    def used(self) -> torch.Tensor:
        """The layer that was taken last, on the device."""
        return self._used.rows

    def forget(self, length: int) -> None:
        """Forget positions from `length` on, which are going to change."""
        self._flushed = min(self._flushed, length)
        for side in (self._used, self._coming):
            if side.end > length:
                side.layer = -1

    def _fetch(self, layer: int, length: int) -> None:
        """Let the whole blocks of a layer come."""
        side, end = self._coming, _whole_blocks(length)
        side.layer, side.end = layer, end
        side.arrival = self._thread.submit(self._bring, self._host.loading(layer, side.rows, end), end, self._flushed)
        self._flushed = max(self._flushed, end)

    def _bring(self, load: Callable[[], None], end: int, num_flushed: int) -> None:
        if end > num_flushed:
            self._host.flush(end)
        load()


def _whole_blocks(length: int) -> int:
    return length // BLOCK_POSITIONS * BLOCK_POSITIONS
