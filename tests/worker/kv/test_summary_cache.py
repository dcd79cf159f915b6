"""A summarised cache keeps important chunks, and one entry per other chunk."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.sparse_cache import CHUNK_SIZE, NUM_PINNED, NUM_RECENT, PERIOD, SummaryKVCache, chunk_scores
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.kv.cache_parts import queries_at, random_cache

SHAPE = CacheShape(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu"))
MAX_LENGTH = 4000
BUDGET = NUM_PINNED + NUM_RECENT + 4 * CHUNK_SIZE
FIRST_BUILD = NUM_PINNED + NUM_RECENT + 8 * CHUNK_SIZE


@pytest.fixture
def full() -> FullKVCache:
    return random_cache(SHAPE, MAX_LENGTH)


def queries(position: int) -> torch.Tensor:
    return queries_at(SHAPE, position)


def followed(full: FullKVCache, *lengths: int) -> SummaryKVCache:
    cache = SummaryKVCache(SHAPE, BUDGET, Sequence("a", [0], SamplingParams(max_tokens=MAX_LENGTH - 1), 1))
    for length in lengths:
        full.roll_back(0)
        full.advance(length)
        cache.follow(full, queries)
    return cache


def entries(cache: SummaryKVCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (part[:, : cache.num_entries] for part in cache.layer(layer))
    return keys, values


def test_everything_is_whole_as_long_as_it_is_short(full: FullKVCache) -> None:
    cache = followed(full, 100, FIRST_BUILD - 1)
    assert cache.bias is None
    keys, values = entries(cache, 1)
    assert torch.equal(keys, full.layer(1)[0][:, : FIRST_BUILD - 1])
    assert torch.equal(values, full.layer(1)[1][:, : FIRST_BUILD - 1])


def test_the_most_important_chunks_are_whole_and_the_others_one_entry_each(full: FullKVCache) -> None:
    length = FIRST_BUILD + 2 * PERIOD + 40
    cache = followed(full, length)
    num_chunks = (length - 40 - NUM_PINNED - NUM_RECENT) // CHUNK_SIZE
    for layer in range(SHAPE.num_layers):
        keys, values = full.layer(layer)
        held_keys, held_values = entries(cache, layer)
        for head in range(SHAPE.num_kv_heads):
            starts = [NUM_PINNED + i * CHUNK_SIZE for i in range(num_chunks)]
            means = torch.stack([keys[head, s : s + CHUNK_SIZE].mean(dim=0) for s in starts])
            score = chunk_scores(means[None], queries(length - 40)[layer, head][None])[0]
            order = score.argsort(descending=True).tolist()
            entry = NUM_PINNED
            for chunk in order[:4]:
                positions = slice(starts[chunk], starts[chunk] + CHUNK_SIZE)
                assert torch.equal(held_keys[head, entry : entry + CHUNK_SIZE], keys[head, positions])
                assert torch.equal(held_values[head, entry : entry + CHUNK_SIZE], values[head, positions])
                entry += CHUNK_SIZE
            for chunk in order[4:]:
                start = starts[chunk]
                assert torch.equal(held_keys[head, entry], keys[head, start + CHUNK_SIZE // 2])
                torch.testing.assert_close(
                    held_values[head, entry], values[head, start : start + CHUNK_SIZE].mean(dim=0)
                )
                entry += 1
            newest = NUM_PINNED + num_chunks * CHUNK_SIZE
            assert torch.equal(held_keys[head, entry:], keys[head, newest:length])


def test_summaries_weigh_what_the_positions_they_stand_for_weigh(full: FullKVCache) -> None:
    """Attention over the entries equals that over a text of equal positions."""
    for layer in range(SHAPE.num_layers):
        keys, values = full.layer(layer)
        keys[:] = keys[:, :1].clone()
        values[:, : MAX_LENGTH // 2] = 1.0
        values[:, MAX_LENGTH // 2 :] = 0.0
    cache = followed(full, MAX_LENGTH - 100)
    assert cache.bias is not None
    keys, values = entries(cache, 0)
    mask = torch.zeros(1, keys.shape[1])
    mask[:, : len(cache.bias)] = torch.from_numpy(cache.bias)
    query = torch.randn(SHAPE.num_kv_heads, 1, SHAPE.head_dim)
    attended = scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask)
    assert float(attended.mean()) == pytest.approx(MAX_LENGTH / 2 / (MAX_LENGTH - 100), abs=1e-3)
    assert float(cache.bias.max()) == pytest.approx(math.log(CHUNK_SIZE))


def test_what_it_holds_follows_from_the_tokens_alone(full: FullKVCache) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [300]
    while lengths[-1] < 1500:
        lengths.append(lengths[-1] + int(torch.randint(1, 60, (), generator=generator)))
    for count in range(1, len(lengths), 7):
        slow, fresh = followed(full, *lengths[:count]), followed(full, lengths[count - 1])
        assert slow.num_entries == fresh.num_entries
        for layer in range(SHAPE.num_layers):
            for ours, theirs in zip(entries(slow, layer), entries(fresh, layer), strict=True):
                assert torch.equal(ours, theirs)


def test_it_holds_a_long_text_in_few_entries(full: FullKVCache) -> None:
    cache = followed(full, MAX_LENGTH)
    assert cache.num_entries <= BUDGET + CHUNK_SIZE + PERIOD + MAX_LENGTH // CHUNK_SIZE
