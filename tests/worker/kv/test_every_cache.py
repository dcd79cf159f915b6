from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from swiftbatch.worker.kv import file_offload
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.file_offload import offloaded_cache
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.host_copies import CudaLane, Staging, computing_stream
from swiftbatch.worker.kv.kv_capacity import PoolSize
from swiftbatch.worker.kv.slot_arena import KVArena
from tests.worker.kv.cache_parts import MAX_LENGTH, held, rows_of, shape, use_small_blocks, write
from tests.worker.kv.lazy_stream import LazyStream

NewCache = Callable[[CacheShape], FullKVCache]
ON_CPU = ("device", "arena", "staged", "pages", "file")
ON_GPU = ("arena on a gpu",)
NUM_PAGES = 40
PIECE_BYTES = 1 << 15  # so that checkpoints take many pieces
STAGING: dict[str, Callable[[CacheShape], Staging | None]] = {  # of arenas
    "arena": lambda shape: None,
    "staged": lambda shape: Staging(EagerLane(), LazyStream(), PIECE_BYTES),
    "arena on a gpu": lambda shape: Staging(CudaLane(shape.device), computing_stream(shape.device), PIECE_BYTES),
}


class EagerLane(LazyStream):
    """Copies at once, as these tests compute at once."""

    def submit(self, work: Callable[[], object]) -> None:
        work()


@pytest.fixture(autouse=True, scope="module")
def _fixed_threads() -> None:
    torch.set_num_threads(1)  # the other one reads


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_blocks(monkeypatch)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
class TestEveryCache:
    @pytest.fixture(params=[*ON_CPU, *(pytest.param(kind, marks=pytest.mark.gpu) for kind in ON_GPU)])
    def kind(self, request: pytest.FixtureRequest) -> str:
        if request.param in ON_GPU and not torch.cuda.is_available():
            pytest.skip("no CUDA device on this machine")
        return str(request.param)

    @pytest.fixture
    def shape(self, kind: str, num_layers: int) -> CacheShape:
        return shape(num_layers, "cuda" if kind in ON_GPU else "cpu")

    @pytest.fixture
    def new_cache(self, kind: str, shape: CacheShape, tmp_path: Path) -> NewCache:
        if kind == "device":
            return lambda shape: FullKVCache(shape, MAX_LENGTH)
        if kind in STAGING:
            arena = KVArena(shape, 3, MAX_LENGTH + 100, staging=STAGING[kind](shape))
            arena.buffer.fill_(math.nan)
            return lambda shape: arena.new_cache(MAX_LENGTH)
        if kind == "pages":
            pages = KVArena(shape, 3, MAX_LENGTH, PoolSize(NUM_PAGES, MAX_LENGTH // 8))
            return lambda shape: pages.new_cache(MAX_LENGTH)
        return lambda shape: offloaded_cache(shape, MAX_LENGTH, str(tmp_path))

    @pytest.fixture
    def cache(self, new_cache: NewCache, shape: CacheShape) -> FullKVCache:
        """300 committed positions."""
        torch.manual_seed(0)
        cache = new_cache(shape)
        for _ in range(3):
            write(cache, shape, 100)
            cache.advance(100)
        return cache

    def test_what_is_written_is_returned_with_all_that_was_committed(
        self, cache: FullKVCache, shape: CacheShape
    ) -> None:
        before = held(cache, shape)
        for layer in range(shape.num_layers):
            key, value = rows_of(shape, 5)
            keys, values = cache.write(layer, 300, key, value)
            assert keys[:, 300:305].equal(key)
            assert values[:, 300:305].equal(value)
            assert keys[:, :300].cpu().equal(before[2 * layer])
            assert values[:, :300].cpu().equal(before[2 * layer + 1])

    def test_a_tree_that_fills_two_tiles_is_seen_whole_by_the_second(
        self, cache: FullKVCache, shape: CacheShape
    ) -> None:
        first = [rows_of(shape, 5) for _ in range(shape.num_layers)]
        for layer, rows in enumerate(first):
            cache.write(layer, 300, *rows)
        for layer, (key, _) in enumerate(first):
            keys, _ = cache.write(layer, 305, *rows_of(shape, 4))
            assert keys[:, 300:305].equal(key)

    def test_the_accepted_path_is_kept_and_the_rest_forgotten(self, cache: FullKVCache, shape: CacheShape) -> None:
        tree = [rows_of(shape, 6) for _ in range(shape.num_layers)]
        for layer, rows in enumerate(tree):
            cache.write(layer, 300, *rows)
        cache.commit([1, 4])
        assert cache.length == 303
        for layer, (key, value) in enumerate(tree):
            keys, values = cache.write(layer, 303, *rows_of(shape, 1))
            assert keys[:, 300:303].equal(key[:, [0, 2, 5]])
            assert values[:, 300:303].equal(value[:, [0, 2, 5]])

    def test_positions_go_out_and_come_back_bit_for_bit(
        self, cache: FullKVCache, new_cache: NewCache, shape: CacheShape
    ) -> None:
        copy = new_cache(shape)
        copy.load(cache.kv(0, 170))
        copy.load(cache.kv(170, 300))
        assert copy.length == 300
        for ours, theirs in zip(held(copy, shape), held(cache, shape), strict=True):
            assert ours.equal(theirs)

    def test_positions_are_copied_from_another_of_its_kind_bit_for_bit(
        self, cache: FullKVCache, new_cache: NewCache, shape: CacheShape
    ) -> None:
        copy = new_cache(shape)
        copy.copy_from(cache, 130)
        write(copy, shape, 3)  # fetches the layers as they are now
        copy.copy_from(cache, 290)
        assert (copy.length, copy.num_copied) == (290, 290)
        for ours, theirs in zip(held(copy, shape), held(cache, shape), strict=True):
            assert ours.equal(theirs[:, :290])

    def test_no_positions_go_out_and_come_back_too(self, cache: FullKVCache, shape: CacheShape) -> None:
        nothing = cache.kv(300, 300)
        assert nothing.shape == (2 * shape.num_layers * shape.num_kv_heads, 0, shape.head_dim)
        cache.load(nothing)
        assert cache.length == 300

    def test_what_is_loaded_takes_the_place_of_what_was_rolled_back(
        self, cache: FullKVCache, shape: CacheShape
    ) -> None:
        write(cache, shape, 1)  # fetches the layers as they are now
        other = cache.kv(0, 300)[:, ::-1].copy()
        cache.roll_back(0)
        cache.load(other)
        for ours, theirs in zip(held(cache, shape), other.reshape(-1, 2, 300, shape.head_dim), strict=True):
            assert (ours.view(torch.int16).numpy().view(np.uint16) == theirs).all()

    def test_more_than_its_length_is_refused(self, cache: FullKVCache, shape: CacheShape) -> None:
        rows = 2 * shape.num_layers * shape.num_kv_heads
        with pytest.raises(ValueError, match="at most 700"):
            cache.load(np.zeros((rows, 701, shape.head_dim), np.uint16))

    def test_a_replayed_token_leaves_no_trace(self, cache: FullKVCache, shape: CacheShape) -> None:
        before = held(cache, shape)
        with cache.replayed(130) as view:
            assert view.length == 130
            write(view, shape, 1)
        assert cache.length == 300
        for ours, theirs in zip(held(cache, shape), before, strict=True):
            assert ours.equal(theirs)

    def test_cleared_positions_are_zero(self, cache: FullKVCache, shape: CacheShape) -> None:
        cache.clear()
        assert not any(part.any() for part in held(cache, shape))

    def test_what_is_stored_is_what_the_device_has(self, cache: FullKVCache, shape: CacheShape) -> None:
        for layer in range(shape.num_layers):
            for stored, on_device in zip(cache.stored(layer), cache.layer(layer), strict=True):
                assert stored[:, :300].cpu().equal(on_device[:, :300].cpu())


@pytest.mark.sample(2)
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_any_use_gives_the_rows_of_a_cache_on_the_device(tmp_path: Path, num_layers: int, seed: int) -> None:
    """Trees, chains, steps back, views ahead and layers in any order."""
    rng, sizes = random.Random(seed), shape(num_layers)
    ours = offloaded_cache(sizes, MAX_LENGTH, str(tmp_path))
    theirs = FullKVCache(sizes, MAX_LENGTH)

    def forward(ours: FullKVCache, theirs: FullKVCache, num_rows: int) -> None:
        for layer in range(num_layers):
            rows = rows_of(sizes, num_rows)
            both = zip(ours.write(layer, ours.length, *rows), theirs.write(layer, ours.length, *rows), strict=True)
            assert all(a[:, : ours.length + num_rows].equal(b[:, : ours.length + num_rows]) for a, b in both)

    def step(ours: FullKVCache, theirs: FullKVCache) -> None:
        num_nodes = rng.randrange(32)
        forward(ours, theirs, 1 + num_nodes)
        path = sorted(rng.sample(range(num_nodes), rng.randrange(num_nodes + 1)))
        ours.commit(path)
        theirs.commit(path)

    for _ in range(60):
        if theirs.length > MAX_LENGTH - 200 or rng.random() < 0.1:
            length = rng.randrange(theirs.length + 1)
            ours.roll_back(length)
            theirs.roll_back(length)
        if rng.random() < 0.2:
            views = ours.prefix(ours.length), theirs.prefix(theirs.length)
            for _ in range(5):
                step(*views)
        if rng.random() < 0.2:
            layer = rng.randrange(num_layers)
            assert ours.layer(layer)[0][:, : ours.length].equal(theirs.layer(layer)[0][:, : ours.length])
        step(ours, theirs)


def test_a_file_system_without_direct_reads_does_as_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(file_offload.fcntl, "fcntl", refuse)
    test_any_use_gives_the_rows_of_a_cache_on_the_device(tmp_path, 3, 0)
