"""Key-value cache of one sequence: every committed position, and room behind them for one draft tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_TREE_NODES = 127


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a target model's key-value cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def bytes_per_position(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class FullKVCache:
    """One preallocated buffer `[num_layers, 2, num_kv_heads, capacity, head_dim]`; slot = absolute position.

    The first `length` slots are committed. A step writes the root's row to slot `length` and the draft tree's nodes
    behind it, in node order; `commit` moves the accepted path next to the root and forgets the rest.
    Untouched pages of the buffer cost no memory.
    """

    def __init__(self, shape: CacheShape, max_length: int) -> None:
        self.length = 0
        self._buffer = torch.empty(
            shape.num_layers,
            2,
            shape.num_kv_heads,
            max_length + MAX_TREE_NODES,
            shape.head_dim,
            dtype=shape.dtype,
            device=shape.device,
        )

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each `[num_kv_heads, capacity, head_dim]`."""
        return self._buffer[index, 0], self._buffer[index, 1]

    def commit(self, path: list[int]) -> None:
        """Commit the root's row and the accepted nodes `path`; roll back all other nodes."""
        root = self.length
        source = [root + 1 + node for node in path]
        target = list(range(root + 1, root + 1 + len(path)))
        if source != target:
            self._buffer[..., target, :] = self._buffer[..., source, :]
        self.length = root + 1 + len(path)

    def advance(self, num_positions: int) -> None:
        """Commit rows of a chain (prefill or replay) that were written in place."""
        self.length += num_positions

    def clear(self) -> None:
        """Make all of it zero (and so touch its memory)."""
        self._buffer.zero_()

    def roll_back(self, length: int) -> None:
        """Forget all positions from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length}: {self.length} positions are committed")
        self.length = length
