"""Partial caches, which the target sees while it drafts: some of a sequence's keys and values, and the chain behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from swiftbatch.worker.caches.entries import Entries, NewEntries
from swiftbatch.worker.caches.full import MAX_TREE_NODES, CacheShape, FullKVCache
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.kernels.sizes import BLOCK

CHAIN_ROOM = 2 * MAX_TREE_NODES  # entries for a chain of drawn tokens and one tree below it
NUM_PINNED = 16  # first positions that are always seen (TokenSwift's |S|)

Queries = Callable[[int], torch.Tensor]
"""Queries of the sequence's token at a position, `[num_layers, num_kv_heads, group, head_dim]`."""


class Scanned(Protocol):
    """Keys of a sequence that rows see beside the entries, as the kernels read them."""

    @property
    def address(self) -> int:
        """The address of a `scanned_keys` of `worker/kernels/source/api.h`."""


class PartialCache(ABC):
    """One buffer of entries, the same number in every layer and head; a kind chooses what of the sequence is in them.

    Copies only: what is here steers drafts and can never change the output. What a kind holds follows from the tokens
    alone, so a resumed job has the same.
    """

    comes_by_layer = False  # as `FullKVCache` says it

    def __init__(self, shape: CacheShape, num_entries: int, new_entries: NewEntries = Entries) -> None:
        """Make room for `num_entries` entries of the sequence and a chain. Raises KVRoomError as `new_entries` does."""
        self.shape = shape
        self.entries = new_entries(shape, capacity_for(num_entries))
        self.bias = None
        self.scanned: Scanned | None = None  # what rows see of the sequence beside the entries
        self._num_sequence_entries = 0
        self._num_drawn = 0
        self._buffer = self.entries.buffer

    @property
    def bias(self) -> np.ndarray | None:
        """`[some first entries] float32`, added to their scores; None for no bias."""
        return self._bias

    @bias.setter
    def bias(self, bias: np.ndarray | None) -> None:
        self._bias = bias
        self.entries.set_bias(bias)

    @property
    def num_entries(self) -> int:
        """The number of entries in use, the chain's included."""
        return self._num_sequence_entries + self._num_drawn

    def follow(self, full: FullKVCache, queries: Queries) -> None:
        """Forget the chain and take in what was committed since."""
        self._num_drawn = 0
        self._take_in(full, queries)

    def catch_up(self, full: FullKVCache, num_chunks: int) -> bool:
        """Take in some chunks of what was committed, so that `follow` need not do it at once; whether no more come."""
        return True

    @abstractmethod
    def _take_in(self, full: FullKVCache, queries: Queries) -> None:
        """Bring the sequence's entries up to `full.length`."""

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each `[num_kv_heads, capacity, head_dim]`."""
        return self._buffer[index, 0], self._buffer[index, 1]

    def write(
        self, layer: int, first_entry: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write rows `[num_kv_heads, num_rows, head_dim]`; returns keys and values up to their end."""
        end = first_entry + key.shape[1]
        self._buffer[layer, 0, :, first_entry:end] = key
        self._buffer[layer, 1, :, first_entry:end] = value
        return self._buffer[layer, 0, :, :end], self._buffer[layer, 1, :, :end]

    def keep(self, path: list[int]) -> None:
        """Keep the chain's newest token and the nodes `path` below it, forget its other nodes."""
        self._num_drawn = self.entries.keep_path(self.num_entries, path) - self._num_sequence_entries

    def keep_drawn(self, num_rows: int) -> None:
        """Keep rows that were written one behind the other: the chain's newest token and those drawn behind it."""
        self._num_drawn += num_rows

    def _keys(self, full: FullKVCache, layer: int, positions: slice) -> torch.Tensor:
        """Keys of consecutive positions on the device, `[num_kv_heads, num_positions, head_dim]`."""
        return full.stored(layer)[0][:, positions].to(self.shape.device)


def capacity_for(num_entries: int) -> int:
    """Entries of the buffer behind which `num_entries` of the sequence and a chain have room, whole blocks."""
    return -(-(num_entries + CHAIN_ROOM) // BLOCK) * BLOCK


class PartialCacheFactory(Protocol):
    """Makes a sequence's partial cache with a budget of entries. Raises KVRoomError as `new_entries` does."""

    def __call__(
        self, shape: CacheShape, budget: int, sequence: Sequence, new_entries: NewEntries = ..., /
    ) -> PartialCache: ...
