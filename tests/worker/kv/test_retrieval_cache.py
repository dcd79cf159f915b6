"""TriForce's partial caches: retrieved chunks, newest positions, heavy hitters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from bench import compared_caches
from bench.compared_caches import HeavyHitterKVCache, StreamingKVCache
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.importance_cache import ImportanceKVCache, RetrievalKVCache
from swiftbatch.worker.kv.sparse_cache import NUM_PINNED
from tests.worker.kv.partial_cache_parts import BUDGET, PROMPT, SHAPE, check_copies, follow, queries, random_cache, text

CHUNK = 4
STRIDE = 12

KINDS: dict[str, Callable[[], ImportanceKVCache]] = {
    "retrieval": lambda: RetrievalKVCache(SHAPE, BUDGET, text(PROMPT + 1), chunk_size=CHUNK, stride=STRIDE),
    "large chunks": lambda: RetrievalKVCache(SHAPE, BUDGET, text(PROMPT + 1), chunk_size=17, stride=STRIDE),
    "streaming": lambda: StreamingKVCache(SHAPE, BUDGET, text(PROMPT + 1)),
    "h2o": lambda: HeavyHitterKVCache(SHAPE, BUDGET, text(PROMPT + 1)),
}


@pytest.fixture
def full() -> FullKVCache:
    return random_cache()


@pytest.fixture(autouse=True)
def small_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared_caches, "OBSERVED_EVERY", 6)


@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    """The contract of worker/kv/sparse_cache.py."""

    def test_entries_are_copies_and_none_is_held_twice(self, full: FullKVCache, kind: str) -> None:
        cache = KINDS[kind]()
        for length in (30, 39, 59, 101, 103, 181, 299):
            follow(cache, full, length)
            num_entries = min(length, cache.positions.shape[-1])
            check_copies(cache, full, num_entries)
            for layer in range(SHAPE.num_layers):
                for head in range(SHAPE.num_kv_heads):
                    held = cache.positions[layer, head, :num_entries].tolist()
                    assert len(set(held)) == len(held)
                    assert set(range(NUM_PINNED)) < set(held)
                    assert length - 1 in held, "what came since the last build is always seen"

    def test_what_it_holds_follows_from_the_tokens_alone(self, full: FullKVCache, kind: str) -> None:
        slow = KINDS[kind]()
        generator = torch.Generator().manual_seed(1)
        length = PROMPT
        while length < 300:
            follow(slow, full, length)
            fresh = KINDS[kind]()  # as in a job that was resumed here
            follow(fresh, full, length)
            assert torch.equal(fresh.positions, slow.positions)
            length += int(torch.randint(1, 9, (), generator=generator))


def test_the_chunks_with_most_attention_by_their_mean_keys_are_retrieved(full: FullKVCache) -> None:
    cache = KINDS["retrieval"]()
    built_at = BUDGET + 10 * STRIDE
    follow(cache, full, built_at)
    num_chunks = (built_at - NUM_PINNED) // CHUNK
    for layer in range(SHAPE.num_layers):
        keys = full.layer(layer)[0][:, NUM_PINNED : NUM_PINNED + num_chunks * CHUNK]
        means = keys.unflatten(1, (num_chunks, CHUNK)).mean(dim=2)  # [num_kv_heads, num_chunks, head_dim]
        for head in range(SHAPE.num_kv_heads):
            weights = torch.softmax(means[head] @ queries(built_at)[layer, head].T / 2, dim=0).sum(dim=1)
            best = weights.argsort(descending=True)[: (BUDGET - NUM_PINNED) // CHUNK]
            expected = (NUM_PINNED + best[:, None] * CHUNK + torch.arange(CHUNK)).flatten().tolist()
            assert cache.positions[layer, head, NUM_PINNED:].tolist() == expected, "in falling order of importance"


def test_new_positions_overwrite_the_chunks_that_matter_least(full: FullKVCache) -> None:
    cache = KINDS["retrieval"]()
    built_at = BUDGET + 10 * STRIDE
    follow(cache, full, built_at)
    before = cache.positions.clone()
    follow(cache, full, built_at + 5)
    assert torch.equal(cache.positions[:, :, :-5], before[:, :, :-5])
    assert cache.positions[0, 0, -5:].tolist() == list(range(built_at + 4, built_at - 1, -1))


def test_positions_behind_the_last_whole_chunk_are_held(full: FullKVCache) -> None:
    cache = KINDS["large chunks"]()
    follow(cache, full, 99)  # built at 98, where four chunks of 17 are whole
    assert set(range(NUM_PINNED + 4 * 17, 99)) <= set(cache.positions[1, 1].tolist())


def test_a_chunk_that_was_left_out_comes_back_when_it_is_asked_for(full: FullKVCache) -> None:
    cache = KINDS["retrieval"]()
    needle = slice(NUM_PINNED + 3 * CHUNK, NUM_PINNED + 4 * CHUNK)
    wanted = torch.full((SHAPE.num_layers, SHAPE.num_kv_heads, 2, SHAPE.head_dim), 3.0)
    for layer in range(SHAPE.num_layers):
        full.layer(layer)[0][:, needle] = 5.0
    lengths = (BUDGET + 10 * STRIDE, BUDGET + 11 * STRIDE)
    has_needle = []
    for length, query in zip(lengths, (-wanted, wanted), strict=True):
        full.roll_back(0)
        full.advance(length)
        cache.follow(full, lambda _, query=query: query)  # type: ignore[misc]
        has_needle.append(bool((cache.positions == needle.start).any()))
    assert has_needle == [False, True]


def test_streaming_holds_the_newest_positions(full: FullKVCache) -> None:
    cache = KINDS["streaming"]()
    for length in (BUDGET + 3, 150, 153, 161):
        follow(cache, full, length)
        assert set(cache.positions[1, 1].tolist()) == {*range(NUM_PINNED), *range(length - 24, length)}


def test_heavy_hitters_stay_and_what_was_evicted_never_comes_back(full: FullKVCache) -> None:
    cache = KINDS["h2o"]()
    heavy = 60
    query = torch.full((SHAPE.num_layers, SHAPE.num_kv_heads, 2, SHAPE.head_dim), 3.0)
    for layer in range(SHAPE.num_layers):
        full.layer(layer)[0][:, heavy] = 5.0
    evicted: set[int] = set()
    for length in range(BUDGET, 300, 6):  # where it is built
        full.roll_back(0)
        full.advance(length)
        cache.follow(full, lambda _: query)
        held = set(cache.positions[0, 1].tolist())
        assert not held & evicted
        evicted |= set(range(length)) - held
        assert heavy in held or length <= heavy
    assert len(evicted) == length - BUDGET


def test_a_low_acceptance_rate_asks_for_a_build_and_a_resume_has_the_same_entries(full: FullKVCache) -> None:
    def new() -> RetrievalKVCache:
        return RetrievalKVCache(SHAPE, 150, text(PROMPT + 1), chunk_size=CHUNK, stride=200, rebuild_below=0.5)

    caches = new(), RetrievalKVCache(SHAPE, 150, text(PROMPT + 1), chunk_size=CHUNK, stride=200)
    built = []
    for length in range(160, 300, 3):
        for cache in caches:
            follow(cache, full, length)
            cache.observe(8, 0, length)
        built.append((caches[0]._built_at, caches[1]._built_at))
    assert len({ours for ours, _ in built}) > len({theirs for _, theirs in built})
    resumed = new()
    resumed.restore(caches[0].state())
    for cache in (caches[0], resumed):
        follow(cache, full, 299)
    assert torch.equal(caches[0].positions.sort(dim=-1).values, resumed.positions.sort(dim=-1).values)


def test_an_unfit_state_is_refused(full: FullKVCache) -> None:
    cache = RetrievalKVCache(SHAPE, BUDGET, text(PROMPT + 1), rebuild_below=0.5)
    for state in ({"retrieval_cache": np.array([0.5])}, {"retrieval_cache": np.array([np.nan, 3.0])}):
        with pytest.raises(ValueError, match="retrieval cache: found"):
            cache.restore(state)
