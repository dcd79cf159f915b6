"""Window layers' pages are freed once unseen."""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from swiftbatch.worker.kernels.kernel_sizes import BLOCK, ROW_CHOICES
from swiftbatch.worker.kv.cache_rows import NO_PAGE, CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import NUM_ASKED, HeldPositions, PagesError, PoolSize, WindowPages
from swiftbatch.worker.kv.slot_arena import KVArena
from tests.worker.kv.cache_parts import shape, use_side_by_side, write
from tests.worker.kv.window_parts import spoil_free_pages

LENGTH, PAGE, WINDOW = 900, 64, 40
SHAPE = replace(shape(3), windows=(WINDOW, None, WINDOW))
HELD = HeldPositions(300, 0.0)
ROWS = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def arena_of(shape: CacheShape = SHAPE, num_pages: int = 40, num_window_pages: int = 20) -> KVArena:
    arena = KVArena(shape, 3, LENGTH, PoolSize(num_pages, PAGE, WindowPages(num_window_pages, HELD)))
    arena.buffer.fill_(torch.nan)
    for pool in (arena.pool, arena.windowed.pool):
        random.Random(1).shuffle(pool._free)
    spoil_free_pages(arena)
    return arena


def new_cache(arena: KVArena) -> FullKVCache:
    return arena.new_cache(LENGTH)


def read_to(end: int, *caches: FullKVCache) -> None:
    """Fill all caches with the same rows."""
    while caches[0].length < end:
        start, count = caches[0].length, min(50, end - caches[0].length)
        rows = ROWS[:, start : start + count]
        for cache in caches:
            for layer in range(cache.shape.num_layers):
                cache.write(layer, start, rows + layer, rows - layer)
            cache.advance(count)


@pytest.mark.parametrize("seed", range(3))
def test_while_windows_see_all_any_use_gives_the_rows_of_a_cache_alone(seed: int) -> None:
    torch.manual_seed(seed)
    wide = replace(SHAPE, windows=(LENGTH, None, LENGTH))
    plain = replace(SHAPE, windows=())
    cache = new_cache(arena_of(wide))
    use_side_by_side(cache, FullKVCache(plain, LENGTH), LENGTH, random.Random(seed), num_steps=20)


def test_pages_that_no_row_sees_are_free_again_and_the_others_have_the_same_rows() -> None:
    arena = arena_of()
    cache, alone = new_cache(arena), FullKVCache(replace(SHAPE, windows=()), LENGTH)
    read_to(800, cache, alone)
    first = (800 - WINDOW - BLOCK - NUM_ASKED) // PAGE * PAGE
    assert cache.window_pages[: first // PAGE] == [NO_PAGE] * (first // PAGE)
    assert NO_PAGE not in [*cache.window_pages[first // PAGE :], *cache.pages]
    assert cache.stores[1].num_pages == len(cache.window_pages) - first // PAGE
    assert arena.windowed.num_free_pages == 20 - len(cache.window_pages[first // PAGE :])
    assert (cache.kv(first, 800) == alone.kv(first, 800)).all()
    with pytest.raises(ValueError, match="forgotten"):
        cache.kv(first - 1, 800)
    assert cache.num_held == 800 - first * 2 // 3
    del cache
    gc.collect()
    assert (arena.windowed.num_free_pages, arena.num_free_pages, len(arena.leases.free)) == (20, 40, 3)


def test_paths_are_moved_in_both_pools_over_the_edges_of_pages_and_windows() -> None:
    arena = arena_of()
    cache, alone = new_cache(arena), FullKVCache(replace(SHAPE, windows=()), LENGTH)
    for end in (60, 252, 500, 765):
        read_to(end, cache, alone)
        torch.manual_seed(end)
        write(cache, SHAPE, 31)
        torch.manual_seed(end)
        write(alone, SHAPE, 31)
        for each in (cache, alone):
            each.commit([0, 3, 11, 29])
        assert (cache.kv(end - 50, end + 5) == alone.kv(end - 50, end + 5)).all()


def test_what_a_checkpoint_has_still_to_write_and_what_others_copy_is_held() -> None:
    arena = arena_of()
    cache, alone = new_cache(arena), FullKVCache(replace(SHAPE, windows=()), LENGTH)
    cache.retain(0, 130)
    cache.retain(0)
    read_to(500, cache, alone)
    assert (cache.kv(0, 500) == alone.kv(0, 500)).all()
    cache.release(320)
    read_to(800, cache, alone)
    assert (cache.kv(320, 800) == alone.kv(320, 800)).all()
    assert cache.window_pages[3:5] == [NO_PAGE] * 2
    assert cache.stores[1].num_pages == len(cache.window_pages) - 2
    assert cache.copyable_end(700) == 130
    other = new_cache(arena)
    other.copy_from(cache, 130)
    assert (other.kv(0, 130) == alone.kv(0, 130)).all()
    assert list(other.window_pages[:2]) == list(cache.window_pages[:2])
    read_to(700, other)
    assert (other.kv(576, 700) == alone.kv(576, 700)).all()
    assert (cache.kv(0, 130) == alone.kv(0, 130)).all(), "one that has forgotten its share takes nothing from the other"


def test_a_cache_goes_back_as_far_as_its_rows_see_what_is_there_and_else_to_where_all_is() -> None:
    arena = arena_of()
    cache, alone = new_cache(arena), FullKVCache(replace(SHAPE, windows=()), LENGTH)
    cache.retain(0, 100)
    read_to(800, cache, alone)
    cache.roll_back(800 - NUM_ASKED)
    assert cache.length == 800 - NUM_ASKED
    cache.roll_back(600)
    assert (cache.length, len(cache.pages), len(cache.window_pages)) == (100, 2, 2)
    read_to(400, cache)
    assert (cache.kv(0, 100) == alone.kv(0, 100)).all()
    assert (cache.kv(320, 400) == alone.kv(320, 400)).all()


@pytest.mark.parametrize("end", [230, 300])
def test_one_that_goes_back_into_a_page_that_another_has_too_gets_its_own(end: int) -> None:
    """The roll-back ends before what is forgotten, or at its beginning."""
    arena = arena_of()
    one, other, alone = new_cache(arena), new_cache(arena), FullKVCache(replace(SHAPE, windows=()), LENGTH)
    one.retain(0, 300)
    read_to(300, one)
    read_to(600, alone)
    other.copy_from(one, 256)
    other.retain(0, 250)
    read_to(600, other)
    other.roll_back(end)
    assert (other.length, len(other.window_pages)) == (min(end, 250), 4)
    assert not {NO_PAGE, one.window_pages[3]}.intersection(other.window_pages)
    read_to(400, other)
    assert (other.kv(0, 230) == alone.kv(0, 230)).all()
    assert (other.kv(320, 400) == alone.kv(320, 400)).all()
    assert (one.kv(0, 300) == alone.kv(0, 300)).all()


@pytest.mark.parametrize("pool", ["pool", "windows"])
def test_who_finds_no_page_in_one_of_the_pools_has_as_many_positions_in_both(pool: str) -> None:
    arena = arena_of()
    one, other = new_cache(arena), new_cache(arena)
    one.retain(0, 300)
    read_to(300, one)
    other.copy_from(one, 256)
    chosen = arena.pool if pool == "pool" else arena.windowed.pool
    taken = chosen.take(chosen.num_free)
    other.roll_back(200)
    assert (other.length, len(other.pages), len(other.window_pages)) == (192, 3, 3)
    with pytest.raises(PagesError):
        other.reserve(300)
    third = new_cache(arena)
    with pytest.raises(PagesError):
        third.copy_from(one, 210)
    assert third.length <= 192
    assert len(third.pages) == len(third.window_pages) == third.length // PAGE
    chosen.give_back(taken)
    kv = np.array(one.kv(0, 300))
    third.roll_back(0)
    third.load(kv)
    assert (third.kv(192, 300) == kv[:, 192:]).all()


def test_a_view_of_a_beginning_gives_nothing_back() -> None:
    arena = arena_of()
    cache = new_cache(arena)
    read_to(800, cache)
    before, num_free = list(cache.window_pages), arena.windowed.num_free_pages
    view = cache.prefix(790)
    write(view, SHAPE, 20)
    view.advance(20)
    assert (list(cache.window_pages), arena.windowed.num_free_pages) == (before, num_free)
    with pytest.raises(ValueError, match="forgotten"):
        cache.prefix(500)


def test_a_length_that_nobody_has_written_takes_the_pages_of_a_window() -> None:
    arena = arena_of(num_window_pages=5)
    cache = new_cache(arena)
    cache.clear()
    cache.advance(700)
    assert sum(page != NO_PAGE for page in cache.window_pages) <= 4
    cache.roll_back(0)
    assert cache.length == 0


def test_what_is_held_for_others_and_for_a_way_back_gives_way_where_pages_run_out() -> None:
    arena = arena_of(num_window_pages=9)
    cache, alone = new_cache(arena), FullKVCache(replace(SHAPE, windows=()), LENGTH)
    cache.retain(0, 250)
    cache.retain(-100)
    read_to(400, cache, alone)
    assert cache.copyable_end(400) >= 250
    taken = arena.windowed.pool.take(arena.windowed.num_free_pages)
    read_to(700, cache, alone)
    assert cache.copyable_end(250) == 0
    first = cache.window_pages.index(next(page for page in cache.window_pages if page != NO_PAGE)) * PAGE
    assert first <= 700 - WINDOW - NUM_ASKED
    assert (cache.kv(first, 700) == alone.kv(first, 700)).all()
    assert arena.windowed.num_free_pages + cache.stores[1].num_pages + len(taken) == 9


def test_what_the_host_has_of_a_text_comes_a_part_at_a_time_and_pages_of_another_all_at_once() -> None:
    arena = arena_of()
    one, other = new_cache(arena), new_cache(arena)
    one.retain(0, 300)
    read_to(300, one)
    third, alone = new_cache(arena), FullKVCache(replace(SHAPE, windows=()), LENGTH)
    read_to(300, alone)
    other.copy_from(one, 300)
    third.copy_from(alone, 300)
    assert (other.length, third.length) == (300, ROW_CHOICES[-1])
