from __future__ import annotations

import functools
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from swiftbatch.worker.forward.forward_interface import Forwards, SparseRows, partial_rows
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.target_model import DTYPES, load_forwards, load_transformers
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kv.file_offload import offloaded_cache
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.draft_tree import DraftTree
from tests.worker.kernels.kernel_parts import needs_kernels, random_tree
from tests.worker.kv.cache_parts import everything_of

pytestmark = needs_kernels
BOUNDS = {"bfloat16": 0.06, "float32": 1e-4}  # of the largest logit
NUM_ENTRIES = (0, 1, 63, 64, 65, 127, 300, 2047, 2048, 2100)
LOAD = {"native": load_forwards, "transformers": load_transformers}


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> dict[tuple[str, str], Forwards]:
    files, cpu = locate_model(str(tiny_model)), torch.device("cpu")
    found = {(kind, name): load(files, dtype, cpu) for kind, load in LOAD.items() for name, dtype in DTYPES.items()}
    assert all(isinstance(each, NativeForwards) == (kind == "native") for (kind, _), each in found.items())
    return found


@pytest.fixture(params=[(kind, dtype) for kind in LOAD for dtype in DTYPES], ids=" ".join)
def forwards(request: pytest.FixtureRequest, loaded: dict[tuple[str, str], Forwards]) -> Forwards:
    return loaded[request.param]


@pytest.fixture(params=list(DTYPES))
def both(request: pytest.FixtureRequest, loaded: dict[tuple[str, str], Forwards]) -> tuple[Forwards, Forwards]:
    return loaded["native", request.param], loaded["transformers", request.param]


def bound(forwards: Forwards) -> float:
    return BOUNDS[str(forwards.dtype).removeprefix("torch.")]


def assert_near(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert (found.float() - expected.float()).abs().max() <= bound * expected.float().abs().max()


@functools.cache
def tokens(vocab_size: int) -> list[int]:
    numbers = random.Random(1)
    return [numbers.randrange(vocab_size) for _ in range(2200)]


def read(forwards: Forwards, length: int) -> FullKVCache:
    cache = FullKVCache(forwards.cache_shape, length + 200)
    while cache.length < length:
        forwards.read(cache, tokens(forwards.vocab_size)[cache.length : length])
    return cache


def rows_of(forwards: Forwards, num_entries: int, num_nodes: int, seed: int, is_biased: bool) -> SparseRows:
    """Rows are equal for all forwards of a dtype."""
    numbers, shape = random.Random(seed), forwards.cache_shape
    noise = torch.Generator().manual_seed(seed)
    full = FullKVCache(shape, num_entries)
    full.rows.buffer[:] = torch.randn(full.rows.buffer.shape, generator=noise).to(shape.dtype)
    full.advance(num_entries)
    bias = np.linspace(-2, 4, num_entries * 2 // 3, dtype=np.float32) if is_biased else None
    cache = everything_of(shape, full, bias)
    tree = random_tree(numbers, num_nodes, 0, forwards.vocab_size)
    return partial_rows(cache, numbers.randrange(forwards.vocab_size), num_entries + 700, tree)


@pytest.mark.sample(3)
@pytest.mark.parametrize("is_biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("num_entries", NUM_ENTRIES)
def test_kernels_and_transformers_say_the_same(
    both: tuple[Forwards, Forwards], num_entries: int, is_biased: bool
) -> None:
    for sizes in ([0], [31, 1], [127]):
        groups = [
            [rows_of(forwards, num_entries, num_nodes, seed, is_biased) for seed, num_nodes in enumerate(sizes)]
            for forwards in both
        ]
        (hidden, logits), expected = (each.check(rows) for each, rows in zip(both, groups, strict=True))
        assert_near(hidden, expected[0], bound(both[0]))
        assert_near(logits, expected[1], bound(both[0]))
        for ours, theirs in zip(*groups, strict=True):
            used = slice(num_entries, num_entries + len(ours))
            for layer in range(both[0].cache_shape.num_layers):
                for mine, its in zip(ours.cache.layer(layer), theirs.cache.layer(layer), strict=True):
                    assert_near(mine[:, used], its[:, used], bound(both[0]))


@pytest.mark.parametrize("length", [0, 1, 63, 64, 100])
def test_rows_behind_everything_say_what_the_full_cache_says_in_every_round(forwards: Forwards, length: int) -> None:
    full = read(forwards, length)
    partial = everything_of(forwards.cache_shape, full)
    numbers = random.Random(length)
    for _ in range(3):
        room = BLOCK - 1 - full.length % BLOCK  # the full cache's edge; a partial one has none
        tree = random_tree(numbers, min(20, room), full.length, forwards.vocab_size)
        root = numbers.randrange(forwards.vocab_size)
        checked = forwards.check([partial_rows(partial, root, full.length, tree)])
        expected = forwards.run([tree_rows(full, root, tree)])
        for found, exact in zip(checked, expected, strict=True):
            assert_near(found, exact, bound(forwards))
        path = [len(tree) - 1] if len(tree) and tree.parents[-1] == -1 else []
        full.commit(path)
        partial.keep(path)
        assert partial.num_entries == full.length


@pytest.mark.parametrize("num_entries", [1, 33, 63, 64])
def test_the_deepest_tree_fits_behind_any_number_of_entries(both: tuple[Forwards, Forwards], num_entries: int) -> None:
    tree = DraftTree.chain([7] * (BLOCK - 1))
    logits = []
    for forwards in both:
        cache = rows_of(forwards, num_entries, 0, 3, is_biased=True).cache
        logits.append(forwards.check([partial_rows(cache, 5, num_entries, tree)])[1])
    assert_near(*logits, bound(both[0]))


def test_a_bias_of_the_logarithm_of_three_weighs_as_three_equal_entries(forwards: Forwards) -> None:
    thrice = read(forwards, 72)
    thrice.rows.buffer[..., :72, :] = thrice.rows.buffer[..., :24, :].repeat(1, 1, 1, 3, 1)
    once = read(forwards, 24)
    once.rows.buffer[..., :24, :] = thrice.rows.buffer[..., :24, :]
    bias = np.full(24, math.log(3), dtype=np.float32)
    shape, tree = forwards.cache_shape, DraftTree.chain([4, 8])
    caches = [everything_of(shape, thrice), everything_of(shape, once, bias), everything_of(shape, once)]
    logits = [forwards.check([partial_rows(cache, 9, 72, tree)])[1] for cache in caches]
    assert_near(logits[1], logits[0], bound(forwards))
    assert (logits[2] - logits[0]).abs().max() > 10 * (logits[1] - logits[0]).abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_entries", [1, 65, 300])
def test_neither_other_rows_nor_what_was_left_behind_the_entries_change_a_bit(
    loaded: dict[tuple[str, str], Forwards], dtype: str, num_entries: int
) -> None:
    """So a resumed job, whose cache was rebuilt, has the same drafts."""
    forwards = loaded["native", dtype]
    alone, among = (rows_of(forwards, num_entries, 20, 5, is_biased=True) for _ in range(2))
    among.cache._buffer[..., num_entries:, :].normal_()
    other = rows_of(forwards, 70, 9, 6, is_biased=False)
    [first] = [forwards.check([alone])[1]]
    assert torch.equal(forwards.check([other, among])[1][len(other) :], first)


@pytest.mark.parametrize("length", [0, 40, 64, 130])
def test_queries_are_the_same_in_both_and_committed_positions_keep_their_bits(
    both: tuple[Forwards, Forwards], length: int
) -> None:
    found = []
    for forwards in both:
        cache = read(forwards, length)
        before = cache.kv(0, length).copy()
        found.append(forwards.queries(cache, 11))
        assert cache.length == length
        assert np.array_equal(cache.kv(0, length), before)
    shape = both[0].cache_shape
    assert found[0].shape == (shape.num_layers, shape.num_kv_heads, 2, shape.head_dim)
    assert_near(*found, bound(both[0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_that_comes_layer_by_layer_gives_the_same_queries(
    loaded: dict[tuple[str, str], Forwards], dtype: str, tmp_path: Path
) -> None:
    forwards = loaded["native", dtype]
    expected = forwards.queries(read(forwards, 130), 11)
    cache = offloaded_cache(forwards.cache_shape, 200, str(tmp_path))
    while cache.length < 130:
        forwards.read(cache, tokens(forwards.vocab_size)[cache.length : 130])
    assert torch.equal(forwards.queries(cache, 11), expected)
