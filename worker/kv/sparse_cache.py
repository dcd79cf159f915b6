"""Sparse KV caches for drafts: the interface of partial caches, and one that summarises chunks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np
import torch

from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kv.cache_rows import CacheShape, keep_path
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES
from swiftbatch.worker.sampling.sequence import Sequence

CHAIN_ROOM = 2 * MAX_TREE_NODES  # a chain of sampled tokens and one tree below it fit
NUM_PINNED = 16  # queries always see the first positions (TokenSwift's |S|)
Queries = Callable[[int], torch.Tensor]
"""Queries of the sequence's token at a position, `[num_layers, num_kv_heads, group, head_dim]`."""


class Entries:
    """Entries of a partial cache, `buffer [num_layers, 2, num_kv_heads, capacity, head_dim]`."""

    def __init__(self, shape: CacheShape, capacity: int, buffer: torch.Tensor | None = None) -> None:
        self.shape = shape
        self.bias: np.ndarray | None = None  # float32, of the first entries' scores; others have 0
        if buffer is None:
            size = (shape.num_layers, 2, shape.num_kv_heads, capacity, shape.head_dim)
            # kernels read whole blocks: unwritten entries weigh almost nothing, but must be numbers
            buffer = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self.buffer = buffer

    def new_means(self, part: int, num_chunks: int) -> torch.Tensor:
        """Allocate means of keys (part 0) or values, `[num_layers, num_kv_heads, num_chunks, head_dim]`."""
        size = (self.shape.num_layers, self.shape.num_kv_heads, num_chunks, self.shape.head_dim)
        return torch.empty(size, dtype=self.shape.dtype, device=self.shape.device)

    def copy(self, full: FullKVCache, positions: slice, first_entry: int) -> None:
        """Copy consecutive positions to consecutive entries, in all layers."""
        entries = slice(first_entry, first_entry + positions.stop - positions.start)
        for layer in range(self.shape.num_layers):
            for part, rows in enumerate(full.stored_between(layer, positions)):
                self.buffer[layer, part, :, entries] = self.shape.numbers(rows)

    def gather(self, full: FullKVCache, positions: torch.Tensor, first_entry: int) -> None:
        """Copy each head's own `positions [num_layers, num_kv_heads, num_rows]` to consecutive entries."""
        entries = slice(first_entry, first_entry + positions.shape[2])
        for layer, own in enumerate(positions):
            for part, source in enumerate(full.stored(layer)):
                rows = own[..., None].expand(-1, -1, source.shape[-1])
                gathered = source.gather(1, rows)
                self.buffer[layer, part, :, entries] = self.shape.numbers(gathered)

    def gather_values(self, means: torch.Tensor, chunks: torch.Tensor, first_entry: int) -> None:
        """Copy the value means of each head's own `chunks [num_layers, num_kv_heads, num_rows]` to entries."""
        for layer, own in enumerate(chunks):
            rows = own[..., None].expand(-1, -1, self.shape.head_dim)
            self.buffer[layer, 1, :, first_entry : first_entry + own.shape[1]] = means[layer].gather(1, rows)

    def average(self, full: FullKVCache, part: int, positions: slice, means: torch.Tensor) -> None:
        """Fill `means [num_layers, num_kv_heads, num_chunks, head_dim]` with the means over chunks of positions."""
        for layer, own in enumerate(means):
            rows = self.shape.numbers(full.stored_between(layer, positions)[part])
            chunks = rows.unflatten(1, (own.shape[1], -1))  # [num_kv_heads, num_chunks, chunk_size, head_dim]
            own.copy_(chunks.float().mean(dim=2))

    def replace(self, full: FullKVCache, positions: slice, entries: torch.Tensor) -> None:
        """Copy consecutive positions to any `entries [num_positions]`."""
        for layer in range(self.shape.num_layers):
            for part, rows in enumerate(full.stored_between(layer, positions)):
                self.buffer[layer, part, :, entries] = self.shape.numbers(rows)

    def keep_path(self, root: int, path: list[int]) -> int:
        return keep_path(self.buffer, root, path)

    def set_bias(self, bias: np.ndarray | None) -> None:
        self.bias = bias


NewEntries = Callable[[CacheShape, int], Entries]
"""Allocates a number of entries. Raises KVRoomError."""


class Scanned(Protocol):
    """Scanned keys as the kernels read them."""

    @property
    def address(self) -> int:
        """Return the address of a `scanned_keys` struct of `worker/kernels/source/api.h`."""


class SparseCache(ABC):
    """Buffer of chosen entries, the same number in every layer and head.

    The entries affect drafts and never the output. Their choice depends on the tokens and `state`, so resumed jobs
    choose alike.
    """

    comes_by_layer = False

    def __init__(self, shape: CacheShape, num_entries: int, new_entries: NewEntries = Entries) -> None:
        self.shape = shape
        self.entries = new_entries(shape, capacity_for(num_entries))
        self.first_angle = self.adapter = 0  # as in the sequence's full cache
        self.bias = None
        self.scanned: Scanned | None = None  # rows see these keys beside the entries
        self._num_sequence_entries = 0
        self._num_drawn = 0
        self._buffer = self.entries.buffer

    @property
    def bias(self) -> np.ndarray | None:
        return self.entries.bias

    @bias.setter
    def bias(self, bias: np.ndarray | None) -> None:
        self.entries.set_bias(bias)

    @property
    def num_entries(self) -> int:
        return self._num_sequence_entries + self._num_drawn

    def follow(self, full: FullKVCache, queries: Queries) -> None:
        self._num_drawn, self.first_angle, self.adapter = 0, full.first_angle, full.adapter
        self._take_in(full, queries)

    def catch_up(self, full: FullKVCache, num_chunks: int) -> bool:
        """Add some committed chunks now, so that `follow` has less to do; return whether no chunk is left."""
        return True

    def observe(self, num_checked: int, num_accepted: int, length: int) -> None:  # noqa: B027 - most learn nothing
        """Learn how many tokens of a chain, checked with this cache, the full cache of `length` positions accepted."""

    def state(self) -> dict[str, np.ndarray]:
        """Return what the choice of entries depends on beside the tokens."""
        return {}

    def restore(self, state: dict[str, np.ndarray]) -> None:  # noqa: B027 - nor keep anything
        """Restore a result of `state`. Raises ValueError for arrays that do not fit, and then changes nothing."""

    @abstractmethod
    def _take_in(self, full: FullKVCache, queries: Queries) -> None:
        """Update the sequence's entries to `full.length`."""

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of one layer, each `[num_kv_heads, capacity, head_dim]`."""
        return self._buffer[index, 0], self._buffer[index, 1]

    def write(
        self, layer: int, first_entry: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write rows `[num_kv_heads, num_rows, head_dim]`; return keys and values up to their end."""
        end = first_entry + key.shape[1]
        self._buffer[layer, 0, :, first_entry:end] = key
        self._buffer[layer, 1, :, first_entry:end] = value
        return self._buffer[layer, 0, :, :end], self._buffer[layer, 1, :, :end]

    def keep(self, path: list[int]) -> None:
        """Keep the chain's newest token and the nodes `path` below it."""
        self._num_drawn = self.entries.keep_path(self.num_entries, path) - self._num_sequence_entries

    def keep_sampled(self, num_rows: int) -> None:
        self._num_drawn += num_rows

    def _keys(self, full: FullKVCache, layer: int, positions: slice) -> torch.Tensor:
        return self.shape.numbers(full.stored_between(layer, positions)[0])


def capacity_for(num_entries: int) -> int:
    """Return the capacity for `num_entries` and a chain, in whole blocks."""
    return -(-(num_entries + CHAIN_ROOM) // BLOCK) * BLOCK


class SparseCacheFactory(Protocol):
    """Makes a sequence's partial cache with a budget of entries. Raises KVRoomError as `new_entries` does."""

    def __call__(
        self, shape: CacheShape, budget: int, sequence: Sequence, new_entries: NewEntries = ..., /
    ) -> SparseCache: ...


# Summarised cache: the most important chunks whole, every other chunk as one entry, the newest positions.


CHUNK_SIZE = 32
NUM_RECENT = 256  # newest positions are always whole
PERIOD = 256  # a build follows so many positions later
PARTS = {"keys": 0, "values": 1}


class SummaryKVCache(SparseCache):
    """Pinned positions, chosen chunks, summaries of the others and newest positions, rebuilt at fixed positions."""

    def __init__(
        self, shape: CacheShape, budget: int, sequence: Sequence, new_entries: NewEntries = Entries, /
    ) -> None:
        """`budget` counts entries for single positions; each summarised chunk takes one more entry."""
        max_length = sequence.max_length
        self._num_chosen = _num_chosen(budget)
        self._first_build = NUM_PINNED + NUM_RECENT + 2 * self._num_chosen * CHUNK_SIZE
        super().__init__(shape, _num_entries(budget, max_length), new_entries)
        self._mean_keys = ChunkMeans(self.entries, max_length, CHUNK_SIZE, "keys")
        self._mean_values = ChunkMeans(self.entries, max_length, CHUNK_SIZE, "values")
        self._built_at: int | None = None
        self._num_fed = 0

    def _take_in(self, full: FullKVCache, queries: Queries) -> None:
        if full.length >= self._first_build:
            built_at = self._first_build + (full.length - self._first_build) // PERIOD * PERIOD
            if built_at != self._built_at:
                self._build(full, built_at, queries(built_at))
        self.entries.copy(full, slice(self._num_fed, full.length), self._num_sequence_entries)
        self._num_sequence_entries += full.length - self._num_fed
        self._num_fed = full.length

    def _build(self, full: FullKVCache, length: int, queries: torch.Tensor) -> None:
        num_chunks = (length - NUM_PINNED - NUM_RECENT) // CHUNK_SIZE
        scores = chunk_scores(self._mean_keys.extend(full, num_chunks), queries)
        mean_values = self._mean_values.extend(full, num_chunks)
        self._fill(full, scores.argsort(dim=-1, descending=True), mean_values)
        num_whole = NUM_PINNED + self._num_chosen * CHUNK_SIZE
        self._num_sequence_entries = num_whole + num_chunks - self._num_chosen
        bias = np.zeros(self._num_sequence_entries, dtype=np.float32)
        bias[num_whole:] = math.log(CHUNK_SIZE)
        self.bias = bias
        self._num_fed = NUM_PINNED + num_chunks * CHUNK_SIZE
        self._built_at = length

    def _fill(self, full: FullKVCache, order: torch.Tensor, mean_values: torch.Tensor) -> None:
        """Write all entries; `order [num_layers, num_kv_heads, num_chunks]` has the chunks, most important first."""
        chosen, others = order[..., : self._num_chosen], order[..., self._num_chosen :]
        first = torch.arange(NUM_PINNED, device=self.shape.device).expand(*order.shape[:2], -1)
        inside = torch.arange(CHUNK_SIZE, device=self.shape.device)
        whole = torch.cat([first, (NUM_PINNED + chosen[..., None] * CHUNK_SIZE + inside).flatten(2)], dim=2)
        middles = NUM_PINNED + others * CHUNK_SIZE + CHUNK_SIZE // 2
        self.entries.gather(full, torch.cat([whole, middles], dim=2), 0)
        self.entries.gather_values(mean_values, others, whole.shape[2])


def partial_positions(budget: int, max_length: int, chunk_size: int | None = None) -> int:
    """Return a cache's device memory in positions of a full cache.

    `chunk_size` None is a summarised cache; 0 one that chooses positions, not chunks.
    """
    if chunk_size is None:
        return capacity_for(_num_entries(budget, max_length)) + max_length // CHUNK_SIZE
    return capacity_for(min(budget, max_length) + chunk_size) + (max_length // chunk_size if chunk_size else 0)


def _num_chosen(budget: int) -> int:
    return max(1, (budget - NUM_PINNED - NUM_RECENT) // CHUNK_SIZE)


def _num_entries(budget: int, max_length: int) -> int:
    chosen = _num_chosen(budget) * CHUNK_SIZE
    first_build = NUM_PINNED + NUM_RECENT + 2 * chosen
    num_whole = NUM_PINNED + chosen + NUM_RECENT + CHUNK_SIZE + PERIOD
    return min(max_length, max(first_build, num_whole + max_length // CHUNK_SIZE))


class ChunkMeans:
    """Means of the chunks after the pinned positions, always on the device."""

    def __init__(self, entries: Entries, max_length: int, chunk_size: int, part: Literal["keys", "values"]) -> None:
        self._entries, self._part = entries, PARTS[part]
        self._chunk_size = chunk_size
        self._num_chunks = 0
        self._means = entries.new_means(self._part, max_length // chunk_size)

    def extend(self, full: FullKVCache, num_chunks: int) -> torch.Tensor:
        """Add new chunks up to `num_chunks`; return means `[num_layers, num_kv_heads, num_chunks, head_dim]`."""
        if num_chunks > self._num_chunks:
            first = NUM_PINNED + self._num_chunks * self._chunk_size
            positions = slice(first, NUM_PINNED + num_chunks * self._chunk_size)
            self._entries.average(full, self._part, positions, self._means[:, :, self._num_chunks : num_chunks])
            self._num_chunks = num_chunks
        return self._means[:, :, :num_chunks]


def chunk_scores(mean_keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return each chunk's share of a token's attention by its mean key (TriForce 4.1), summed over the group's heads.

    `mean_keys [..., num_kv_heads, num_chunks, head_dim]`, `queries [..., num_kv_heads, group, head_dim]`; returns
    `[..., num_kv_heads, num_chunks] float32`.
    """
    scores = (mean_keys @ queries.transpose(-1, -2)).float() * queries.shape[-1] ** -0.5
    return torch.softmax(scores, dim=-2).sum(dim=-1)
