from __future__ import annotations

import copy
import gc
import random

import pytest
import torch

from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES, KVRoomError
from swiftbatch.worker.kv.slot_arena import KVArena
from tests.worker.kv.cache_parts import shape, use_side_by_side

LENGTH = 500
SENTINEL = 7.0


@pytest.fixture
def arena() -> KVArena:
    arena = KVArena(shape(2), 3, LENGTH)
    arena.buffer.fill_(SENTINEL)
    return arena


def test_a_slot_holds_the_longest_job_and_its_tree_in_whole_blocks(arena: KVArena) -> None:
    assert arena.capacity >= LENGTH + MAX_TREE_NODES
    assert arena.capacity % BLOCK == 0
    assert arena.buffer.shape == (2, 2, 3, 2, arena.capacity, 32)
    assert arena.buffer.is_contiguous()


def test_every_job_has_a_slot_of_its_own_in_the_one_buffer(arena: KVArena) -> None:
    caches = [arena.new_cache(LENGTH) for _ in range(3)]
    assert {cache.slot for cache in caches} == {0, 1, 2}
    for number, cache in enumerate(caches):
        for layer in range(2):
            cache.write(layer, 0, *(torch.full((2, 1, 32), number, dtype=torch.bfloat16) for _ in range(2)))
    for number, cache in enumerate(caches):
        assert (arena.buffer[:, :, cache.slot, :, 0] == number).all()


def test_a_slot_comes_back_when_its_cache_and_all_views_of_it_are_gone(arena: KVArena) -> None:
    cache = arena.new_cache(LENGTH)
    others = [arena.new_cache(LENGTH) for _ in range(2)]
    slot, view = cache.slot, cache.prefix(0)
    del cache
    assert len(arena.leases.free) == 0, "a view still reads it"
    del view
    assert len(arena.leases.free) == 1
    assert arena.new_cache(LENGTH).slot == slot
    assert len({each.slot for each in others} | {slot}) == 3


def test_views_have_the_slot_of_their_cache(arena: KVArena) -> None:
    cache = arena.new_cache(LENGTH)
    cache.advance(10)
    with cache.replayed(5) as again:
        assert again.slot == copy.copy(cache).slot == cache.slot
    assert len(arena.leases.free) == 2


def test_a_cache_in_a_circle_of_references_gives_its_slot_back(arena: KVArena) -> None:
    gc.disable()
    try:
        caches = [arena.new_cache(LENGTH) for _ in range(3)]
        for cache in caches:
            cache.itself = cache  # type: ignore[attr-defined]
        del cache, caches
        assert len(arena.leases.free) == 0
        arena.new_cache(LENGTH)
    finally:
        gc.enable()


def test_a_longer_job_is_refused_with_the_numbers(arena: KVArena) -> None:
    longest = arena.capacity - MAX_TREE_NODES
    arena.new_cache(longest)
    with pytest.raises(
        KVRoomError, match=rf"a job of {longest + 1:,} positions is longer than .*, {longest:,} pos.* GB"
    ):
        arena.new_cache(longest + 1)
    assert len(arena.leases.free) == 3, "a refusal takes no slot"


def test_without_a_free_slot_a_job_is_refused_with_the_numbers(arena: KVArena) -> None:
    caches = [arena.new_cache(LENGTH) for _ in range(3)]
    with pytest.raises(KVRoomError, match="no slot for a job of 400 positions: all 3 of this worker's GPU are taken"):
        arena.new_cache(400)
    assert len(caches) == 3


@pytest.mark.parametrize("seed", range(4))
def test_any_use_gives_the_rows_of_a_cache_alone_and_touches_no_other_slot(arena: KVArena, seed: int) -> None:
    before, ours, theirs = arena.new_cache(LENGTH), arena.new_cache(LENGTH), FullKVCache(arena.shape, LENGTH)
    use_side_by_side(ours, theirs, LENGTH, random.Random(seed), num_steps=60)
    others = [slot for slot in range(3) if slot != ours.slot]
    assert (arena.buffer[:, :, others] == SENTINEL).all()
    assert before.slot in others
