"""Roll-backs of states and positions stay together in shared pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import PoolSize
from swiftbatch.worker.kv.recurrent_arena import _in_ring
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.model.architectures.recurrent_layers import RecurrentShape
from tests.worker.kv.cache_parts import shape, write

LENGTH, PAGE = 500, 4 * BLOCK


@pytest.fixture
def arena() -> KVArena:
    states = RecurrentShape(
        num_layers=1, num_heads=0, num_key_heads=0, key_dim=0, value_dim=0, num_channels=64, conv_width=3
    )
    return KVArena(replace(shape(1), recurrent=states), 2, LENGTH, PoolSize(6, PAGE))


def read_to(cache: FullKVCache, end: int) -> None:
    while cache.length < end:
        num_rows = min(BLOCK, end - cache.length)
        cache.layer_states.fold_to(cache.length // BLOCK * BLOCK)
        write(cache, cache.shape, num_rows)
        cache.advance(num_rows)


@pytest.mark.parametrize("kept", [0, PAGE])
def test_who_finds_no_page_to_go_back_into_has_no_state_behind_its_positions(arena: KVArena, kept: int) -> None:
    cache = arena.new_cache(LENGTH)
    cache.retain(0, kept)
    read_to(cache, 2 * PAGE)
    arena.pool.share(cache.pages)  # another cache shares these
    arena.pool.take(arena.pool.num_free)
    cache.roll_back(2 * PAGE - BLOCK + 5)
    assert (cache.length, cache.boundary) == (kept, kept)


def test_entries_on_both_sides_of_a_ring_s_end_are_two_parts() -> None:
    """No tested text is long enough to wrap its inputs around the ring."""
    ahead, behind = (slice(0, 1), slice(258, 259)), (slice(1, 3), slice(0, 2))
    assert list(_in_ring(2 * 259 - 1, 2 * 259 + 2, 259)) == [ahead, behind]
    assert list(_in_ring(259, 262, 259)) == [(slice(0, 3), slice(0, 3))]


def test_who_copied_a_state_has_none_before_it(arena: KVArena) -> None:
    source, cache = (arena.new_cache(LENGTH) for _ in range(2))
    read_to(source, 2 * BLOCK + 5)
    source.layer_states.fold_to(2 * BLOCK)
    cache.copy_from(source, 2 * BLOCK)
    assert cache.length == 2 * BLOCK
    cache.roll_back(2 * BLOCK - 9)
    assert cache.length == 0
