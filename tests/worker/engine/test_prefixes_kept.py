"""Prompts of ended jobs are kept for others that begin alike."""

from __future__ import annotations

import pytest

from swiftbatch.worker.engine.prefill import MEMORY_SHARE, SHORTEST, KeptPrefixes
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import KVRoomError
from tests.tiny_targets import target as target
from tests.worker.engine.prefix_parts import decode, new_engine, rows_of, sequence, text

LENGTH = 200  # of every prompt


def bytes_of(target: TargetModel, num_prompts: int) -> int:
    return num_prompts * LENGTH * target.cache_shape.bytes_per_position()


def num_read(target: TargetModel, seeds: list[int], num_shared: int = LENGTH, num_kept: float = 9.0) -> list[int]:
    """Return the tokens read by consecutive jobs, with room for `num_kept`."""
    engine, found = new_engine(target, room=bytes_of(target, 1) * num_kept), []
    for number, seed in enumerate(seeds):
        before = engine.counters.num_read_tokens
        decode(engine, [sequence(target, f"s{number}", text(seed, LENGTH, target.vocab_size), 2)], num_shared)
        found.append(engine.counters.num_read_tokens - before)
    return found


def test_a_prompt_that_others_share_is_read_once_though_its_jobs_come_one_by_one(target: TargetModel) -> None:
    assert num_read(target, [1, 1, 2, 1, 2]) == [199, 0, 199, 0, 0]


def test_of_a_prompt_that_nobody_shares_nothing_is_kept(target: TargetModel) -> None:
    engine = new_engine(target)
    decode(engine, [sequence(target, "a", text(1, LENGTH, target.vocab_size))])
    assert engine.sharing.kept.num_bytes == 0


def test_a_copy_of_what_was_kept_has_the_bits_and_tokens_of_a_prompt_read_alone(target: TargetModel) -> None:
    book = text(1, LENGTH, target.vocab_size)
    engine, longer = new_engine(target), book[:150] + text(2, 60, target.vocab_size)
    [alone] = decode(new_engine(target), [sequence(target, "bb", longer)])
    decode(engine, [sequence(target, "a", book)], 128)  # the driver knows whole blocks
    [behind] = decode(engine, [sequence(target, "bb", longer)], 128)
    assert rows_of(behind) == rows_of(alone)
    assert behind.sequence.output_ids.tolist() == alone.sequence.output_ids.tolist()
    assert engine.counters.num_copied_tokens == 150  # not 128, because a little more is kept


def test_what_was_used_least_recently_goes_first(target: TargetModel) -> None:
    assert num_read(target, [1, 2, 1, 3, 1, 2], num_kept=2) == [199, 199, 0, 199, 0, 199]


def test_where_none_has_room_every_job_reads_its_own(target: TargetModel) -> None:
    assert num_read(target, [1, 1, 1], num_kept=0.9) == [199, 199, 199]


def test_wrong_news_of_what_is_shared_costs_memory_and_nothing_else(target: TargetModel) -> None:
    """Two prompts may share a key by accident; tokens are compared before a copy."""
    assert num_read(target, [1, 2, 1], num_shared=10_000) == [199, 199, 0]


def test_a_longer_beginning_takes_the_place_of_a_shorter_one(target: TargetModel) -> None:
    engine, book = new_engine(target), text(1, LENGTH, target.vocab_size)
    decode(engine, [sequence(target, "a", book[:100])], 64)
    decode(engine, [sequence(target, "bb", book)], 192)
    assert engine.sharing.kept.num_bytes == bytes_of(target, 1) * 199 // LENGTH  # the last token was never read
    decode(engine, [sequence(target, "ccc", book[:100])], 64)
    assert engine.counters.num_read_tokens == 99 + 100


def test_a_limit_is_kept_at_once_and_memory_that_others_take_is_given_back(target: TargetModel) -> None:
    free, size = [0.0], target.cache_shape.bytes_per_position()
    kept, cache = KeptPrefixes(size, lambda: free[0]), FullKVCache(target.cache_shape, LENGTH)
    cache.clear()
    cache.advance(LENGTH)
    for seed in (1, 2, 3):
        free[0] = bytes_of(target, 2) / MEMORY_SHARE - kept.num_bytes
        kept.keep(sequence(target, "a", text(seed, LENGTH, target.vocab_size)).token_ids, SHORTEST, cache)
    assert kept.num_bytes == bytes_of(target, 2)
    free[0] = bytes_of(target, 1) / MEMORY_SHARE - bytes_of(target, 2)
    kept.trim()
    assert kept.num_bytes == bytes_of(target, 1)


def test_where_a_job_has_no_room_beside_them_none_stays(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine(target)
    decode(engine, [sequence(target, "a", text(1, LENGTH, target.vocab_size))], LENGTH)
    assert engine.sharing.kept.num_bytes
    new_cache = target.new_cache

    def with_little_room(max_length: int, num_held: int, forgets: bool, lora: str | None) -> FullKVCache:
        if engine.sharing.kept.num_bytes:
            raise KVRoomError("no room")
        return new_cache(max_length)

    monkeypatch.setattr(target, "new_cache", with_little_room)
    assert engine.new_cache(10).length == 0
