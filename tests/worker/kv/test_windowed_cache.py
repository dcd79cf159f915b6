"""Window layers forget only what no row can need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftbatch.worker.drafters.catalogue import engine_entry
from swiftbatch.worker.drafters.choice.ways import DraftWay, TreeWay
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.drafters.griffin.griffin import GriffinDrafter
from swiftbatch.worker.drafters.mtp.mtp import MTPDrafter
from swiftbatch.worker.drafters.self_speculation import SelfSpeculationDrafter
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache, new_cache_of
from swiftbatch.worker.kv.kv_capacity import (
    FORGETS_EVERY,
    MEMORY,
    NUM_ASKED,
    NUM_UNWRITTEN,
    KVRoom,
    KVRoomError,
    held_of,
    held_positions,
)
from swiftbatch.worker.model.model_files import read_config
from swiftbatch.worker.sampling.draft_tree import DraftTree
from tests.worker.kv.window_parts import EVERY, spoil_what_is_forgotten
from tests.worker.model.kind_parts import native_target
from tests.worker.model.kind_sizes import VOCAB_SIZE

WINDOW = 40
SHAPE = CacheShape(3, 1, 32, torch.float32, torch.device("cpu"), windows=(WINDOW, None, WINDOW))


@pytest.fixture(autouse=True)
def _forgotten_numbers_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_what_is_forgotten(monkeypatch)


def filled(length: int, shape: CacheShape = SHAPE) -> FullKVCache:
    """Make a cache whose entries are their positions."""
    cache = new_cache_of(shape, 4000)
    extend(cache, length)
    return cache


def extend(cache: FullKVCache, length: int) -> None:
    while cache.length < length:
        rows = torch.arange(cache.length, min(length, cache.length + 10), dtype=torch.float32)
        for layer in range(cache.shape.num_layers):
            cache.write(layer, cache.length, *[rows[None, :, None].expand(1, -1, 32)] * 2)
        cache.advance(len(rows))


def first_held(cache: FullKVCache, layer: int = 0) -> int:
    lost = cache.stored(layer)[0][0, : cache.length, 0].isnan().nonzero()
    return int(lost[-1]) + 1 if len(lost) else 0


def test_a_layer_with_a_window_holds_its_window_and_a_few_positions_and_the_others_hold_all() -> None:
    cache = filled(1000)
    assert 1000 - WINDOW - NUM_ASKED - EVERY - 64 <= first_held(cache) <= 1000 - WINDOW - NUM_ASKED
    assert first_held(cache, 2) == first_held(cache)
    assert first_held(cache, 1) == 0
    held = cache.stored(0)[0][0, first_held(cache) : 1000, 0]
    assert held.equal(torch.arange(first_held(cache), 1000, dtype=torch.float32))


def test_what_is_forgotten_is_never_given_away() -> None:
    cache = filled(1000)
    with pytest.raises(ValueError, match="forgotten"):
        cache.kv(0, 100)
    with pytest.raises(ValueError, match="forgotten"):
        cache.prefix(500)
    assert cache.copyable_end(500) == 0
    end = first_held(cache)
    assert cache.kv(end, 1000).shape[1] == 1000 - end


def test_what_a_checkpoint_has_still_to_write_is_held() -> None:
    cache = filled(0)
    cache.retain(0)
    extend(cache, 500)
    assert cache.kv(0, 500).shape[1] == 500
    cache.release(320)
    extend(cache, 1000)
    assert first_held(cache) == 320
    cache.release(100)
    assert first_held(cache) == 320


def test_the_first_positions_are_held_for_others_that_have_the_same_tokens() -> None:
    cache = filled(0)
    cache.retain(0, 200)
    extend(cache, 1000)
    assert cache.copyable_end(900) == 200
    other = new_cache_of(SHAPE, 4000)
    other.copy_from(cache, 200)
    assert other.stored(2)[0][0, 64:200, 0].equal(torch.arange(64, 200, dtype=torch.float32))


def test_a_cache_goes_back_as_far_as_its_rows_see_what_is_there_and_else_to_where_all_is() -> None:
    cache = filled(1000)
    cache.roll_back(1000 - NUM_ASKED)
    assert cache.length == 1000 - NUM_ASKED
    cache.roll_back(first_held(cache) + WINDOW - 1)
    assert cache.length == 0
    extend(cache, 150)
    assert cache.kv(0, 150).max() == 149, "all is there again"
    ready = filled(0)
    ready.retain(-200)
    ready.retain(0, 100)
    extend(ready, 1000)
    ready.roll_back(800)
    assert ready.length == 800
    ready.roll_back(300)
    assert ready.length == 100


def test_segments_that_begin_in_what_is_forgotten_make_the_cache_read_again() -> None:
    """A rewind drops the segment that it falls into."""
    cache = filled(0)
    cache.retain(0)
    cache.release(640)
    extend(cache, 1000)
    cache.retain(640)
    assert cache.length == 1000
    cache.retain(500)
    assert cache.length == 0


def test_a_view_of_a_beginning_forgets_nothing_of_its_cache() -> None:
    cache = filled(1000)
    before = first_held(cache)
    extend(cache.prefix(990), 3000)
    assert first_held(cache) == before


@pytest.mark.parametrize("kind", ["mistral", "gpt_oss", pytest.param("gemma3_text", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_rows_have_the_same_bits_whatever_was_forgotten(tmp_path: Path, kind: str, kv_dtype: None) -> None:
    """Forgotten numbers are NaN and would spread."""
    target = native_target(kind, tmp_path)
    if kv_dtype is not None:
        target = TargetModel.load(target.files, "float32", "cpu", None, kv_dtype=kv_dtype)
    token_ids = torch.randint(3, VOCAB_SIZE, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    caches = [target.new_cache(800, forgets=forgets) for forgets in (True, False)]
    tree = DraftTree.chain(token_ids[:3])
    for end in (300, 500, 700, 700 - NUM_ASKED):
        for cache in caches:
            cache.roll_back(min(cache.length, end))
            while cache.length < end:
                target.read(cache, token_ids[cache.length : end])
        ours, theirs = (target.verify([tree_rows(cache, 7, tree)])[0] for cache in caches)
        assert ours.logits.isfinite().all()
        assert ours.logits.equal(theirs.logits)
        for cache in caches:
            cache.commit([0, 1, 2])
            cache.roll_back(end)
    assert caches[0].num_held < 600
    assert target.cache_room(NUM_UNWRITTEN).held == held_of(read_config(str(tmp_path), tmp_path))


@pytest.mark.parametrize(
    ("names", "drafter"),
    [
        (("triforce", "tokenswift"), SelfSpeculationDrafter),
        (("griffin",), GriffinDrafter),
        (("mtp",), MTPDrafter),
        (("auto", "token-recycling", "suffix", "prompt-lookup"), TreeWay),
    ],
)
def test_the_list_of_engines_says_whose_drafts_read_caches(
    names: tuple[str, ...], drafter: type[Drafter | DraftWay]
) -> None:
    assert {engine_entry(name).reads_caches for name in names} == {drafter.reads_caches}


def test_a_job_needs_room_for_what_its_cache_holds() -> None:
    held = held_positions((WINDOW, None, None, WINDOW), 100)
    assert held is not None
    whole = WINDOW + NUM_ASKED + FORGETS_EVERY + 100
    assert (held.of(0), held.of(whole), held.of(whole + 1001)) == (0, whole, whole + 501)
    assert held_positions((None, None)) is None
    length = int(1.5 * KVRoom(MEMORY, 1 << 20).free_bytes()) >> 20
    KVRoom(MEMORY, 1 << 20, held=held).refuse_too_long(length)
    with pytest.raises(KVRoomError):
        KVRoom(MEMORY, 1 << 20).refuse_too_long(length)
