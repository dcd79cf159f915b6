"""Caches of few layers with random rows."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from swiftbatch.worker.kv import file_offload
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.sparse_cache import Queries, SparseCache

BLOCK = 64  # positions, so that short texts also span blocks
MAX_LENGTH = 1000


def use_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_offload, "BLOCK_POSITIONS", BLOCK)


def shape(num_layers: int, device: str = "cpu") -> CacheShape:
    return CacheShape(num_layers, 2, 32, torch.bfloat16, torch.device(device))


def rows_of(shape: CacheShape, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = (shape.num_kv_heads, num_rows, shape.head_dim)
    return tuple(torch.randn(size).to(shape.device, shape.dtype) for _ in range(2))  # type: ignore[return-value]


def write(cache: FullKVCache, shape: CacheShape, num_rows: int) -> None:
    for layer in range(shape.num_layers):
        cache.write(layer, cache.length, *rows_of(shape, num_rows))


def held(cache: FullKVCache, shape: CacheShape) -> list[torch.Tensor]:
    return [part[:, : cache.length].cpu().clone() for layer in range(shape.num_layers) for part in cache.layer(layer)]


def random_cache(shape: CacheShape, max_length: int) -> FullKVCache:
    """None of the rows is committed."""
    cache, generator = FullKVCache(shape, max_length), torch.Generator().manual_seed(0)
    for layer in range(shape.num_layers):
        for part in cache.layer(layer):
            part.copy_(torch.randn(part.shape, generator=generator))
    return cache


def queries_at(shape: CacheShape, position: int) -> torch.Tensor:
    """Return `[num_layers, num_kv_heads, 2, head_dim]`, fixed per position."""
    size = (shape.num_layers, shape.num_kv_heads, 2, shape.head_dim)
    return torch.randn(size, generator=torch.Generator().manual_seed(position))


def use_side_by_side(
    ours: FullKVCache, theirs: FullKVCache, max_length: int, rng: random.Random, num_steps: int
) -> None:
    """Compare both caches after each step."""
    for _ in range(num_steps):
        if theirs.length > max_length - 40 or rng.random() < 0.1:
            length = rng.randrange(theirs.length + 1)
            for cache in (ours, theirs):
                cache.roll_back(length)
        num_nodes = rng.randrange(32)
        for layer in range(ours.shape.num_layers):
            rows = rows_of(ours.shape, 1 + num_nodes)
            for cache in (ours, theirs):
                cache.write(layer, cache.length, *rows)
        path = sorted(rng.sample(range(num_nodes), rng.randrange(num_nodes + 1)))
        for cache in (ours, theirs):
            cache.commit(path)
        if rng.random() < 0.3:
            with ours.replayed(rng.randrange(ours.length)) as view:
                write(view, ours.shape, 1)
        kv = theirs.kv(0, theirs.length)
        assert (ours.kv(0, ours.length) == kv).all()
        if rng.random() < 0.2:
            ours.roll_back(0)
            ours.load(kv)
        assert all(a.equal(b) for a, b in zip(held(ours, ours.shape), held(theirs, ours.shape), strict=True))


class EverythingCache(SparseCache):
    """A partial cache that holds every position."""

    def _take_in(self, full: FullKVCache, queries: Queries) -> None:
        known = self._num_sequence_entries
        self.entries.copy(full, slice(known, full.length), known)
        self._num_sequence_entries = full.length


def everything_of(shape: CacheShape, full: FullKVCache, bias: np.ndarray | None = None) -> EverythingCache:
    """The first entries have a bias."""
    cache = EverythingCache(shape, full.length)
    cache.follow(full, lambda position: torch.empty(0))
    cache.bias = bias
    return cache
