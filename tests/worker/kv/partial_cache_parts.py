"""A small random full cache, and a check that partial caches copy it."""

from __future__ import annotations

import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.importance_cache import ImportanceKVCache
from swiftbatch.worker.kv.sparse_cache import NUM_PINNED
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.kv import cache_parts as caches

SHAPE = CacheShape(num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
BUDGET = 40
PROMPT = 25  # tokens before a prompt's last one
PERIOD = BUDGET - NUM_PINNED


def text(num_prompt_tokens: int) -> Sequence:
    return Sequence("a", [0] * num_prompt_tokens, SamplingParams(max_tokens=400 - num_prompt_tokens), 1)


def random_cache() -> FullKVCache:
    return caches.random_cache(SHAPE, 400)


def queries(position: int) -> torch.Tensor:
    return caches.queries_at(SHAPE, position)


def follow(cache: ImportanceKVCache, full: FullKVCache, length: int) -> None:
    full.roll_back(0)
    full.advance(length)
    cache.follow(full, queries)


def check_copies(cache: ImportanceKVCache, full: FullKVCache, num_entries: int) -> None:
    for layer in range(SHAPE.num_layers):
        assert cache.num_entries == num_entries
        keys, values = (part[:, :num_entries] for part in cache.layer(layer))
        for head in range(SHAPE.num_kv_heads):
            positions = cache.positions[layer, head, :num_entries]
            assert torch.equal(keys[head], full.layer(layer)[0][head, positions])
            assert torch.equal(values[head], full.layer(layer)[1][head, positions])
