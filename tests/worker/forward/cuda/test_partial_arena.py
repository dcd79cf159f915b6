"""Partial caches in slots equal separate ones, in few launches."""

from __future__ import annotations

import functools

import pytest
import torch

from bench import compared_caches
from bench.compared_caches import PARTIAL_CACHES
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.kv import sparse_cache
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.importance_cache import RetrievalKVCache
from swiftbatch.worker.kv.kv_capacity import KVRoomError
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.kv.sparse_arena import SparseArena, arena_for
from swiftbatch.worker.kv.sparse_cache import SparseCache
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.kernels.cuda.launches import launched

CPU = torch.device("cpu")
SHAPE = CacheShape(num_layers=2, num_kv_heads=2, head_dim=24, dtype=torch.float32, device=CPU)
BUDGET, LONGEST = 64, 400
LENGTHS = (20, 150, 151, 260, 300)
EXACT = ("dynamic", "static", "full", "streaming", "h2o", "topk")


@pytest.fixture(autouse=True)
def small_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens periods, so that a short text is summarised repeatedly."""
    monkeypatch.setattr(sparse_cache, "NUM_RECENT", 48)
    monkeypatch.setattr(sparse_cache, "PERIOD", 32)
    monkeypatch.setitem(PARTIAL_CACHES, "retrieval", functools.partial(RetrievalKVCache, stride=24))
    monkeypatch.setattr(compared_caches, "OBSERVED_EVERY", 8)


def text(max_length: int = LONGEST) -> Sequence:
    return Sequence("a", [0] * min(100, max_length - 1), SamplingParams(max_tokens=max(1, max_length - 100)), 1)


def full_cache(shape: CacheShape = SHAPE) -> FullKVCache:
    arena = KVArena(shape, 2, LONGEST)
    arena.buffer.copy_(torch.randn(arena.buffer.shape, generator=torch.Generator().manual_seed(0)))
    return arena.new_cache(LONGEST)


def arena_of(kind: str, shape: CacheShape = SHAPE, num_slots: int = 2) -> SparseArena:
    arena = arena_for(PARTIAL_CACHES[kind], BUDGET, shape, num_slots, LONGEST)
    for buffer in (arena.buffer, arena.means):
        buffer.fill_(torch.nan)
    return arena


def queries(position: int) -> torch.Tensor:
    return torch.randn(SHAPE.num_layers, SHAPE.num_kv_heads, 2, 24, generator=torch.Generator().manual_seed(position))


def follow(cache: SparseCache, full: FullKVCache, length: int) -> None:
    full.length = length
    cache.follow(full, queries)


@pytest.mark.parametrize("kind", PARTIAL_CACHES)
def test_every_kind_holds_in_a_slot_what_it_holds_elsewhere(kind: str) -> None:
    arena, full = arena_of(kind), full_cache()
    ours = PARTIAL_CACHES[kind](SHAPE, BUDGET, text(), arena.new_entries)
    theirs = PARTIAL_CACHES[kind](SHAPE, BUDGET, text())
    for length in LENGTHS:
        for cache in (ours, theirs):
            follow(cache, full, length)
        assert ours.num_entries == theirs.num_entries
        found, expected = (cache._buffer[..., : cache.num_entries, :] for cache in (ours, theirs))
        assert torch.equal(found, expected) if kind in EXACT else torch.allclose(found, expected, atol=1e-6)
        biases = torch.zeros(arena.capacity)
        if theirs.bias is not None:
            biases[: len(theirs.bias)] = torch.from_numpy(theirs.bias)
        assert torch.equal(arena.bias[0], biases)
    assert (ours.bias is not None) == (kind == "summary")


def test_a_cache_of_its_own_is_copied_from_as_well() -> None:
    """For example one outside the GPU."""
    full, own = full_cache(), FullKVCache(SHAPE, LONGEST)
    own.rows.buffer.copy_(full.rows.buffer)
    ours, theirs = (PARTIAL_CACHES["summary"](SHAPE, BUDGET, text(), arena_of("summary").new_entries) for _ in range(2))
    for length in LENGTHS:
        follow(ours, own, length)
        follow(theirs, full, length)
        held = slice(0, ours.num_entries)
        assert torch.allclose(ours._buffer[..., held, :], theirs._buffer[..., held, :], atol=1e-6)


def launches_of(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Return the launches of a build, and those of a few positions later."""
    shape = CacheShape(num_layers, 2, 24, torch.float32, CPU)
    full, noise = full_cache(shape), torch.randn(num_layers, 2, 2, 24)
    cache = PARTIAL_CACHES["summary"](shape, BUDGET, text(), arena_of("summary", shape).new_entries)
    names = []
    for length in (150, 155):
        full.length = length
        with monkeypatch.context() as patches:
            names.append(launched(patches, functools.partial(cache.follow, full, lambda _: noise)))
    return names[0], names[1]


def test_following_takes_the_same_launches_for_any_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = launches_of(2, monkeypatch), launches_of(4, monkeypatch)
    assert few == many
    assert many[0].count("copy_rows") == 3  # entries, means of values, the newest positions
    assert many[0].count("average_chunk") == 2  # keys and values
    assert many[1] == ["copy_rows"]


def test_slots_come_back_and_who_finds_none_is_told() -> None:
    arena = arena_of("summary")
    caches = [PARTIAL_CACHES["summary"](SHAPE, BUDGET, text(), arena.new_entries) for _ in range(2)]
    assert len(arena.leases.free) == 0
    with pytest.raises(KVRoomError, match="all 2 are taken"):
        PARTIAL_CACHES["summary"](SHAPE, BUDGET, text(), arena.new_entries)
    caches.pop()
    assert len(arena.leases.free) == 1
    with pytest.raises(KVRoomError, match="a partial cache of 704 entries: a slot has"):
        PARTIAL_CACHES["full"](SHAPE, BUDGET, text(LONGEST + 50), arena.new_entries)
    assert len(arena.leases.free) == 1


def test_means_that_a_slot_has_no_room_for_are_refused_and_the_slot_comes_back() -> None:
    arena = arena_of("streaming")
    with pytest.raises(KVRoomError, match="a slot has 0"):
        PARTIAL_CACHES["retrieval"](SHAPE, BUDGET, text(), arena.new_entries)
    assert len(arena.leases.free) == 2


@pytest.mark.parametrize("kind", PARTIAL_CACHES)
@pytest.mark.parametrize("longest", [1, 60, 3000])
def test_a_slot_is_what_the_longest_job_asks_for(kind: str, longest: int) -> None:
    arena = arena_for(PARTIAL_CACHES[kind], 1024, SHAPE, 3, longest)
    for max_length in {2, longest // 2 + 2, max(2, longest)}:
        sequence = Sequence("a", [0], SamplingParams(max_tokens=max_length - 1), 1)
        PARTIAL_CACHES[kind](SHAPE, min(1024, sequence.max_length), sequence, arena.new_entries)
