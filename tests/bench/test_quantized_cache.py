"""A quantized cache keeps each number within half a step."""

from __future__ import annotations

import pytest
import torch

from bench.compared_caches import GROUP, QuantizedKVCache, rounded
from swiftbatch.worker.kv.full_cache import FullKVCache
from tests.worker.kv.partial_cache_parts import PROMPT, SHAPE, queries, random_cache, text


def followed(full: FullKVCache, num_bits: int, *lengths: int) -> QuantizedKVCache:
    cache = QuantizedKVCache(SHAPE, num_bits, text(PROMPT))
    for length in lengths:
        full.roll_back(0)
        full.advance(length)
        cache.follow(full, queries)
    return cache


@pytest.mark.parametrize("num_bits", [1, 2, 4, 8])
def test_numbers_are_at_most_half_a_step_off(num_bits: int) -> None:
    full, length = random_cache(), 3 * GROUP + 10
    cache = followed(full, num_bits, length)
    assert cache.num_entries == length
    num_levels, whole = 2**num_bits, slice(0, 3 * GROUP)
    for layer in range(SHAPE.num_layers):
        for part, (found, exact) in enumerate(zip(cache.layer(layer), full.layer(layer), strict=True)):
            assert torch.equal(found[:, 3 * GROUP : length], exact[:, 3 * GROUP : length])
            wide = exact[:, whole].unflatten(1, (3, GROUP)) if part == 0 else exact[:, whole]
            near = found[:, whole].unflatten(1, (3, GROUP)) if part == 0 else found[:, whole]
            spans = wide.amax(2, keepdim=True) - wide.amin(2, keepdim=True)
            off = (near - wide).abs() / (spans / (num_levels - 1))
            assert 0.2 < off.max() <= 0.501
            levels = near[0, 0, :, 0] if part == 0 else near[0, 0]
            assert len(levels.unique()) <= num_levels


def test_what_it_holds_follows_from_the_tokens_alone() -> None:
    full = random_cache()
    at_once = followed(full, 3, 200)
    by_and_by = followed(full, 3, 1, 63, 64, 65, 127, 190, 200)
    for layer in range(SHAPE.num_layers):
        for found, expected in zip(by_and_by.layer(layer), at_once.layer(layer), strict=True):
            assert torch.equal(found[:, :200], expected[:, :200])


def test_equal_numbers_stay_what_they_are() -> None:
    assert torch.equal(rounded(torch.full((2, 3), 0.3), 1, 3), torch.full((2, 3), 0.3))
