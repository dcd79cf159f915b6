"""Shares of the GPUs that compute a forward together, without heavy imports."""

from __future__ import annotations

from dataclasses import dataclass

from swiftbatch.worker.kernels.kernel_sizes import depth_of_part, parts_of_depth

RANK_CHOICES = (1, 2, 4, 8)  # GPUs of a worker: they divide the parts of a depth


@dataclass(frozen=True)
class Rank:
    """One of the GPUs that share a decoder."""

    number: int
    num_ranks: int

    def share_of(self, count: int) -> slice:
        """Return the own part of `count` things, which all ranks have as many of."""
        own = count // self.num_ranks
        return slice(self.number * own, (self.number + 1) * own)


def kv_heads_of(num_kv_heads: int, rank: Rank) -> slice:
    """Return the rank's heads of keys and values."""
    if num_kv_heads >= rank.num_ranks:
        return rank.share_of(num_kv_heads)
    first = rank.number * num_kv_heads // rank.num_ranks
    return slice(first, first + 1)


def columns_of(depth: int, rank: Rank) -> slice:
    """Return the rank's parts of the depth of a product whose result is added to the state."""
    part = depth_of_part(depth)
    own = rank.share_of(parts_of_depth(depth))
    return slice(min(own.start * part, depth), min(own.stop * part, depth))
