from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from swiftbatch.worker.forward.tile_packing import (
    chain_rows,
    max_tree_depth,
    pack_tiles,
    tails,
    tails_in_python,
    tree_rows,
)
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, TILE_ROWS
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree
from tests.worker.kernels.kernel_parts import needs_kernels, random_tree

SHAPE = CacheShape(2, 1, 4, torch.float32, torch.device("cpu"))
TREE = DraftTree([10, 11, 12, 13, 14], [-1, -1, 0, 2, 1])


def cache_at(length: int) -> FullKVCache:
    cache = FullKVCache(SHAPE, 1000)
    cache.advance(length)
    return cache


def test_a_row_sees_its_ancestors_in_position_order_and_nobody_else() -> None:
    rows = tree_rows(cache_at(BLOCK + 3), root_id=5, tree=TREE)
    root = BLOCK + 3
    node_13 = rows.tail_entries[4][: rows.tail_lengths[4]].tolist()
    assert node_13 == [*range(BLOCK, root + 1), root + 1, root + 3, root + 4]
    assert rows.positions == [root, root + 1, root + 1, root + 2, root + 3, root + 2]
    assert rows.boundary == BLOCK


def test_no_tree_grows_over_the_boundary_and_no_chain_over_its_tile() -> None:
    assert [max_tree_depth(position) for position in (0, BLOCK - 2, BLOCK - 1, BLOCK)] == [63, 1, 0, 63]
    assert len(chain_rows(cache_at(TILE_ROWS - 3), list(range(100)))) == 3
    assert len(chain_rows(cache_at(TILE_ROWS), list(range(100)))) == TILE_ROWS


def test_tiles_hold_all_rows_once_and_never_too_many() -> None:
    chains = [tree_rows(cache_at(8 * i), 1, DraftTree.chain(list(range(20 + i)))) for i in range(4)]
    tiles = list(pack_tiles(chains, pad_rows=False))
    assert [tile.num_rows for tile in tiles] == [32, 32, 26]
    ids = [token_id for tile in tiles for token_id in tile.token_ids()]
    assert ids == [token_id for chain in chains for token_id in chain.token_ids]
    assert [len(tile.token_ids()) for tile in pack_tiles(chains, pad_rows=True)] == [32, 32, 32]


def test_commit_moves_the_accepted_path_next_to_the_root_and_forgets_the_rest() -> None:
    cache = cache_at(7)
    keys, _ = cache.layer(1)
    keys[:, 7:13] = torch.arange(6.0)[:, None]  # the root and five nodes
    cache.commit([1, 4])
    assert cache.length == 10
    assert keys[0, 7:10, 0].tolist() == [0.0, 2.0, 5.0]


def test_rolling_back_beyond_the_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot roll back to 9: 8 positions"):
        cache_at(8).roll_back(9)


@needs_kernels
@pytest.mark.parametrize("seed", range(5))
def test_tails_that_c_makes_are_those_of_python(seed: int) -> None:
    numbers = random.Random(seed)
    roots = [numbers.randrange(1000) for _ in range(9)]
    trees = [random_tree(numbers, numbers.randrange(20), root, 50) for root in roots]
    starts = [root // BLOCK * BLOCK for root in roots]
    entries, lengths = tails(starts, roots, trees)
    expected, expected_lengths = tails_in_python(starts, roots, trees)
    assert np.array_equal(entries, expected)
    assert entries.dtype == expected.dtype
    assert lengths == expected_lengths


@needs_kernels
@pytest.mark.parametrize(
    "tree", [DraftTree([5, 6], [1, -1]), DraftTree([5], [-2]), DraftTree([5], [0]), DraftTree.chain([5] * BLOCK)]
)
def test_a_tree_that_c_cannot_lay_out_is_refused(tree: DraftTree) -> None:
    with pytest.raises(ValueError, match="found trees with nodes in front of their parents, or paths that 64"):
        tails([BLOCK, BLOCK], [BLOCK + 3, BLOCK], [DraftTree(), tree])
