"""The entries of a partial cache, and the copying of them from the sequence's own cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from swiftbatch.worker.caches.full import CacheShape, FullKVCache, keep_path


class Keys(Protocol):
    """Keys of a sequence, to be scanned beside its entries."""

    @property
    def end(self) -> int:
        """Position behind those that are scanned."""

    def extend(self, length: int) -> None:
        """Take in all whole chunks in front of position `length`, which are in the cache."""


class Entries:
    """`buffer [num_layers, 2, num_kv_heads, capacity, head_dim]`; what is copied into it is copied layer by layer."""

    def __init__(self, shape: CacheShape, capacity: int, buffer: torch.Tensor | None = None) -> None:
        """Allocate `capacity` entries, or take a `buffer` for them."""
        self.shape = shape
        if buffer is None:
            size = (shape.num_layers, 2, shape.num_kv_heads, capacity, shape.head_dim)
            # whole blocks are read; entries never written weigh next to nothing, but must hold numbers
            buffer = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self.buffer = buffer

    def new_means(self, part: int, num_chunks: int) -> torch.Tensor:
        """Room for means of chunks of keys (part 0) or values, `[num_layers, num_kv_heads, num_chunks, head_dim]`."""
        size = (self.shape.num_layers, self.shape.num_kv_heads, num_chunks, self.shape.head_dim)
        return torch.empty(size, dtype=self.shape.dtype, device=self.shape.device)

    def expect_keys(self, first: int, num_keys: int, num_best: int) -> None:
        """Expect so many keys from position `first` on to be scanned beside the entries, for `num_best` each time."""

    def new_keys(self, full: FullKVCache) -> Keys | None:
        """Scanned keys of a sequence, none yet, where there is room beside the entries for all that were expected."""
        return None

    def copy(self, full: FullKVCache, positions: slice, first_entry: int) -> None:
        """Copy consecutive positions to consecutive entries, in all layers."""
        entries = slice(first_entry, first_entry + positions.stop - positions.start)
        for layer in range(self.shape.num_layers):
            for part, source in enumerate(full.stored(layer)):
                self.buffer[layer, part, :, entries] = source[:, positions]

    def gather(self, full: FullKVCache, positions: torch.Tensor, first_entry: int) -> None:
        """Copy each head's own `positions [num_layers, num_kv_heads, num_rows]` to consecutive entries."""
        entries = slice(first_entry, first_entry + positions.shape[2])
        for layer, own in enumerate(positions):
            rows = own[..., None].expand(-1, -1, self.shape.head_dim)
            for part, source in enumerate(full.stored(layer)):
                self.buffer[layer, part, :, entries] = source.gather(1, rows.to(source.device))

    def gather_values(self, means: torch.Tensor, chunks: torch.Tensor, first_entry: int) -> None:
        """Make each head's own `chunks [num_layers, num_kv_heads, num_rows]` of means the values of entries."""
        for layer, own in enumerate(chunks):
            rows = own[..., None].expand(-1, -1, self.shape.head_dim)
            self.buffer[layer, 1, :, first_entry : first_entry + own.shape[1]] = means[layer].gather(1, rows)

    def average(self, full: FullKVCache, part: int, positions: slice, means: torch.Tensor) -> None:
        """Fill `means [num_layers, num_kv_heads, num_chunks, head_dim]` with those of chunks of positions."""
        for layer, own in enumerate(means):
            rows = full.stored(layer)[part][:, positions].to(means.device)
            chunks = rows.unflatten(1, (own.shape[1], -1))  # [num_kv_heads, num_chunks, chunk_size, head_dim]
            own.copy_(chunks.float().mean(dim=2))

    def replace(self, full: FullKVCache, positions: slice, entries: torch.Tensor) -> None:
        """Copy consecutive positions to any `entries [num_positions]`."""
        for layer in range(self.shape.num_layers):
            for part, source in enumerate(full.stored(layer)):
                self.buffer[layer, part, :, entries] = source[:, positions].to(self.shape.device)

    def keep_path(self, root: int, path: list[int]) -> int:
        """Keep a path as `worker.caches.full.keep_path` does."""
        return keep_path(self.buffer, root, path)

    def set_bias(self, bias: np.ndarray | None) -> None:
        """Scores of some first entries have a bias from now on, float32; those behind them and None have 0."""


NewEntries = Callable[[CacheShape, int], Entries]
"""Finds room for a number of entries. Raises KVRoomError."""
