"""What the target sees while it drafts: slots with some of a sequence's keys and values, and the draft behind them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from worker.caches.full import MAX_TREE_NODES, CacheShape, FullKVCache
from worker.sequence import Sequence

DRAFT_ROOM = 2 * MAX_TREE_NODES  # slots for drafted tokens and one tree below them
NUM_PINNED = 16  # first positions that are always seen (TokenSwift's |S|)

Queries = Callable[[int], torch.Tensor]
"""Queries of the sequence's token at a position, `[num_layers, num_kv_heads, group, head_dim]`."""


class DraftCache(ABC):
    """One buffer of slots, the same number in every layer and head; a kind chooses what of the sequence is in them.

    Copies only: what is here steers drafts and can never change the output. What a kind holds follows from the tokens
    alone, so a resumed job has the same.
    """

    def __init__(self, shape: CacheShape, num_slots: int) -> None:
        """Make room for `num_slots` slots of the sequence and a draft."""
        self.shape = shape
        self.bias: torch.Tensor | None = None  # [num sequence slots] added to the scores of slots; None for no bias
        self._num_sequence_slots = 0
        self._num_drafted = 0
        size = (shape.num_layers, 2, shape.num_kv_heads, num_slots + DRAFT_ROOM, shape.head_dim)
        self._buffer = torch.empty(size, dtype=shape.dtype, device=shape.device)

    @property
    def num_slots(self) -> int:
        """Slots in use, the draft's included."""
        return self._num_sequence_slots + self._num_drafted

    def follow(self, full: FullKVCache, queries: Queries) -> None:
        """Forget the draft and take in what was committed since."""
        self._num_drafted = 0
        self._take_in(full, queries)

    @abstractmethod
    def _take_in(self, full: FullKVCache, queries: Queries) -> None:
        """Bring the sequence's slots up to `full.length`."""

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a draft's rows `[num_kv_heads, num_rows, head_dim]` behind the slots; returns all keys and values."""
        end = self.num_slots + key.shape[1]
        self._buffer[layer, 0, :, self.num_slots : end] = key
        self._buffer[layer, 1, :, self.num_slots : end] = value
        return self._buffer[layer, 0, :, :end], self._buffer[layer, 1, :, :end]

    def keep(self, path: list[int]) -> None:
        """Keep the draft's newest token and the nodes `path` below it, forget its other nodes."""
        root = self.num_slots
        source = [root + 1 + node for node in path]
        target = list(range(root + 1, root + 1 + len(path)))
        if source != target:
            self._buffer[..., target, :] = self._buffer[..., source, :]
        self._num_drafted += 1 + len(path)

    def _copy(self, full: FullKVCache, positions: slice, first_slot: int) -> None:
        """Copy consecutive positions to consecutive slots, in all layers."""
        slots = slice(first_slot, first_slot + positions.stop - positions.start)
        for layer in range(self.shape.num_layers):
            for part, source in enumerate(full.stored(layer)):
                self._buffer[layer, part, :, slots] = source[:, positions]

    def _gather(self, full: FullKVCache, layer: int, positions: torch.Tensor, first_slot: int) -> None:
        """Copy each head's own `positions [num_kv_heads, num_rows]` of one layer to consecutive slots."""
        rows = positions[..., None].expand(-1, -1, self.shape.head_dim)
        slots = slice(first_slot, first_slot + positions.shape[1])
        for part, source in enumerate(full.stored(layer)):
            self._buffer[layer, part, :, slots] = source.gather(1, rows.to(source.device))

    def _keys(self, full: FullKVCache, layer: int, positions: slice) -> torch.Tensor:
        """Keys of consecutive positions on the device, `[num_kv_heads, num_positions, head_dim]`."""
        return full.stored(layer)[0][:, positions].to(self.shape.device)


DraftCacheFactory = Callable[[CacheShape, int, Sequence], DraftCache]
"""Makes a sequence's draft cache with a budget of slots."""
