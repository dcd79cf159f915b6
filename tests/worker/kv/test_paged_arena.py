"""A pool of pages holds the rows of separate caches."""

from __future__ import annotations

import random

import pytest
import torch

from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import KVRoomError, PoolSize
from swiftbatch.worker.kv.slot_arena import KVArena, PagedRows
from tests.worker.kv.cache_parts import shape, use_side_by_side, write

LENGTH, PAGE, NUM_PAGES = 500, 64, 24
SENTINEL = 7.0


@pytest.fixture
def arena() -> KVArena:
    arena = KVArena(shape(2), 3, LENGTH, PoolSize(NUM_PAGES, PAGE))
    arena.buffer.fill_(SENTINEL)
    random.Random(0).shuffle(arena.pool._free)
    return arena


def cache_of(arena: KVArena, num_positions: int) -> FullKVCache:
    cache = arena.new_cache(LENGTH)
    write(cache, arena.shape, num_positions)
    cache.advance(num_positions)
    return cache


@pytest.mark.parametrize("seed", range(2))
def test_any_use_gives_the_rows_of_a_cache_alone_and_touches_no_other_page(arena: KVArena, seed: int) -> None:
    before, ours, theirs = cache_of(arena, 100), arena.new_cache(LENGTH), FullKVCache(arena.shape, LENGTH)
    kept = before.kv(0, 100)
    use_side_by_side(ours, theirs, LENGTH, random.Random(seed), num_steps=40)
    unused = [page for page in range(NUM_PAGES) if page not in (*ours.pages, *before.pages)]
    untouched = arena.buffer.unflatten(4, (NUM_PAGES, PAGE))[..., unused, :, :]
    assert (before.kv(0, 100) == kept).all()
    assert (untouched == SENTINEL).any()
    assert sorted([*unused, *ours.pages, *before.pages]) == list(range(NUM_PAGES)), "no page has two owners"


def test_pages_are_taken_as_positions_come_and_given_back_as_they_go(arena: KVArena) -> None:
    cache = cache_of(arena, 65)
    assert (len(cache.pages), arena.pool.num_free) == (2, NUM_PAGES - 2)
    assert arena.pages.numbers[cache.slot, :2].tolist() == cache.pages
    write(cache, arena.shape, 200)
    cache.commit(list(range(140)))
    assert (cache.length, len(cache.pages)) == (206, 5), "those of rows that were not accepted stay for the next step"
    view = cache.prefix(64)
    view.roll_back(1)
    assert len(cache.pages) == 5, "a view gives nothing back"
    cache.roll_back(64)
    assert (len(cache.pages), arena.pool.num_free) == (1, NUM_PAGES - 1)
    del cache
    assert arena.pool.num_free == NUM_PAGES - 1, "a view still reads it"
    del view
    assert (arena.pool.num_free, len(arena.leases.free)) == (NUM_PAGES, 3)


def test_a_job_that_finds_no_page_is_told_so_and_the_others_keep_theirs(arena: KVArena) -> None:
    first, second, third = (cache_of(arena, length) for length in (LENGTH, LENGTH, 8 * PAGE - 10))
    assert arena.pool.num_free == 0
    third.length = 8 * PAGE
    with pytest.raises(KVRoomError, match="no page for a job's next positions: all 24 of this worker's GPU are taken"):
        third.reserve(8 * PAGE + 1)
    assert (len(first.pages), len(second.pages), len(third.pages)) == (8, 8, 8)
    del first
    third.reserve(8 * PAGE + 1)
    assert len(third.pages) == 9


def test_whole_pages_of_a_text_that_two_jobs_begin_with_are_there_once(arena: KVArena) -> None:
    source, other = cache_of(arena, 200), arena.new_cache(LENGTH)
    other.copy_from(source, 150)
    assert list(other.pages[:2]) == source.pages[:2]
    assert arena.pool.num_free == NUM_PAGES - 4 - 1, "what lies behind them is a copy"
    kept = source.kv(0, 200)
    assert (other.length, other.num_copied) == (150, 150)
    assert (other.kv(0, 150) == kept[:, :150]).all()
    write(other, arena.shape, 40)
    other.advance(40)
    assert (source.kv(0, 200) == kept).all()
    theirs = other.kv(0, 190)
    del source
    assert arena.pool.num_free == NUM_PAGES - 3, "the pages of both have one owner left"
    cache_of(arena, LENGTH)
    assert (other.kv(0, 190) == theirs).all()


@pytest.mark.parametrize("who", ["the source", "the other"])
def test_who_goes_back_into_a_page_of_several_writes_into_one_of_its_own(arena: KVArena, who: str) -> None:
    source, other = cache_of(arena, 200), arena.new_cache(LENGTH)
    other.copy_from(source, 150)
    back, stays = (source, other) if who == "the source" else (other, source)
    kept = stays.kv(0, stays.length)
    before = back.kv(0, 100)
    back.roll_back(100)
    assert back.pages[0] == stays.pages[0]
    assert back.pages[1] != stays.pages[1]
    write(back, arena.shape, 50)
    back.advance(50)
    assert (stays.kv(0, stays.length) == kept).all()
    assert (back.kv(0, 100) == before).all()


def test_who_goes_back_into_a_page_of_several_and_finds_none_free_forgets_all_of_it(arena: KVArena) -> None:
    source, other = cache_of(arena, 200), arena.new_cache(LENGTH)
    other.copy_from(source, 2 * PAGE)
    kept = source.kv(0, 200)
    arena.pool.take(arena.pool.num_free)
    other.roll_back(100)
    assert (other.length, other.pages) == (PAGE, source.pages[:1])
    assert (other.kv(0, PAGE) == kept[:, :PAGE]).all()
    assert (source.kv(0, 200) == kept).all()
    other.roll_back(0)
    assert arena.pool.num_free == 0, "the source has them all"


def test_what_comes_from_elsewhere_is_loaded_and_what_does_not_fit_refused(arena: KVArena) -> None:
    theirs = FullKVCache(arena.shape, LENGTH)
    write(theirs, arena.shape, 300)
    theirs.advance(300)
    ours = arena.new_cache(LENGTH)
    ours.copy_from(theirs, 300)
    assert (ours.kv(3, 299) == theirs.kv(3, 299)).all()
    assert torch.equal(ours.stored_between(1, slice(50, 200))[1], theirs.stored(1)[1][:, 50:200])
    with pytest.raises(ValueError, match="expected"):
        ours.load(theirs.kv(0, 201))


def test_a_copy_that_finds_no_memory_leaves_the_cache_and_its_pages_as_they_were(
    arena: KVArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = cache_of(arena, 200), cache_of(arena, 64)
    num_free, held = arena.pool.num_free, list(arena.pool._num_holders)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(PagedRows, "copy", full)
        with pytest.raises(torch.OutOfMemoryError):
            cache.copy_from(source, 190)
    assert (cache.length, arena.pool.num_free, arena.pool._num_holders) == (64, num_free, held)
    cache.copy_from(source, 190)
    assert (cache.kv(64, 190) == source.kv(64, 190)).all()
