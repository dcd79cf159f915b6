from __future__ import annotations

import pytest
import torch

from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.importance_cache import ImportanceKVCache, importance
from swiftbatch.worker.kv.sparse_cache import NUM_PINNED
from tests.worker.kv.partial_cache_parts import (
    BUDGET,
    PERIOD,
    PROMPT,
    SHAPE,
    check_copies,
    follow,
    queries,
    random_cache,
    text,
)


@pytest.fixture
def full() -> FullKVCache:
    return random_cache()


def test_everything_is_held_as_long_as_it_fits(full: FullKVCache) -> None:
    cache = ImportanceKVCache(SHAPE, BUDGET, text(PROMPT + 1))
    for length in (PROMPT, PROMPT + 1, BUDGET - 1):
        follow(cache, full, length)
        assert cache.positions[1, 1, :length].tolist() == list(range(length))
        check_copies(cache, full, length)


@pytest.mark.parametrize("prompt", [PROMPT, 150])
def test_pinned_newest_and_most_important_positions_are_held(full: FullKVCache, prompt: int) -> None:
    cache = ImportanceKVCache(SHAPE, BUDGET, text(prompt + 1))
    built_at = max(prompt, BUDGET) + PERIOD
    length = built_at + 5
    follow(cache, full, length)
    check_copies(cache, full, BUDGET)
    for layer in range(SHAPE.num_layers):
        scores = importance(full.layer(layer)[0][:, NUM_PINNED:built_at], queries(built_at)[layer])
        for head in range(SHAPE.num_kv_heads):
            held = cache.positions[layer, head].tolist()
            best = (NUM_PINNED + scores[head].argsort(descending=True)[:PERIOD]).tolist()
            assert held[:NUM_PINNED] == list(range(NUM_PINNED))
            assert held[NUM_PINNED:-5] == best[:-5], "in falling order of importance"
            assert held[-5:] == list(range(length - 1, built_at - 1, -1)), "new ones overwrite from the end"


def test_what_it_holds_follows_from_the_tokens_alone(full: FullKVCache) -> None:
    slow = ImportanceKVCache(SHAPE, BUDGET, text(PROMPT + 1))
    generator = torch.Generator().manual_seed(1)
    length = PROMPT
    while length < 300:
        follow(slow, full, length)
        fresh = ImportanceKVCache(SHAPE, BUDGET, text(PROMPT + 1))  # as in a job that was resumed here
        follow(fresh, full, length)
        assert torch.equal(fresh.positions, slow.positions)
        check_copies(slow, full, min(length, BUDGET))
        length += int(torch.randint(1, 9, (), generator=generator))


def test_a_static_cache_never_follows_the_output(full: FullKVCache) -> None:
    for prompt in (PROMPT, 150):
        cache = ImportanceKVCache(SHAPE, BUDGET, text(prompt + 1), is_static=True)
        follow(cache, full, prompt)
        held = cache.positions.clone()
        follow(cache, full, prompt + 100)
        assert torch.equal(cache.positions, held)
        assert held.max() < prompt


def test_a_draft_lies_behind_the_entries_and_is_forgotten(full: FullKVCache) -> None:
    cache = ImportanceKVCache(SHAPE, BUDGET, text(PROMPT + 1))
    follow(cache, full, 60)
    rows = torch.arange(5.0)[None, :, None].expand(SHAPE.num_kv_heads, 5, SHAPE.head_dim)  # the newest and four nodes
    for layer in range(SHAPE.num_layers):
        cache.write(layer, cache.num_entries, rows, rows)
    cache.keep([0, 3])
    assert cache.num_entries == BUDGET + 3
    keys, values = cache.write(1, cache.num_entries, rows[:, :1], rows[:, :1])
    for kept in (keys, values):
        assert kept[0, BUDGET:, 0].tolist() == [0.0, 1.0, 4.0, 0.0]
    follow(cache, full, 62)
    check_copies(cache, full, BUDGET)


def test_importance_sums_over_the_query_heads_of_a_group() -> None:
    keys, group = torch.randn(2, 7, 4), torch.randn(2, 3, 4)
    scores = importance(keys, group)
    assert scores.shape == (2, 7)
    assert scores[1, 6] == pytest.approx(sum(float(keys[1, 6] @ query) for query in group[1]), rel=1e-5, abs=1e-5)
