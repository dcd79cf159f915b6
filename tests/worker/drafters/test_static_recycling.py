"""Token Recycling's published tree, and its update rules."""

from __future__ import annotations

import numpy as np
import pytest

from swiftbatch.worker.drafters.static_recycling import merged, published_tree
from swiftbatch.worker.drafters.token_recycling import UNKNOWN
from swiftbatch.worker.sampling.draft_tree import ROOT


def paths(shape: tuple[tuple[int, int, int], ...]) -> list[tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, (parent, depth, rank) in enumerate(shape):
        found[node] = (*found[parent], rank)
        assert len(found[node]) == depth
    return list(found.values())[1:]


def test_the_published_tree_has_80_nodes_in_six_layers_that_favour_early_candidates() -> None:
    shape = paths(published_tree(80, 6, 8))
    assert [sum(len(path) == depth for path in shape) for depth in range(1, 7)] == [8, 21, 25, 15, 8, 3]
    assert len(set(shape)) == 80
    assert sum(path[:1] == (0,) for path in shape) > 40
    assert [path for path in shape if path[:1] == (7,)] == [(7,), (7, 0)]
    assert [path for path in shape if len(path) == 6] == [(0,) * 6, (0, 0, 0, 0, 0, 1), (0, 0, 0, 1, 0, 0)]


@pytest.mark.parametrize(
    ("max_nodes", "max_depth", "num_ranks"), [(80, 3, 8), (20, 6, 8), (80, 6, 2), (0, 6, 8), (80, 0, 1)]
)
def test_a_smaller_tree_is_a_part_of_the_published_one(max_nodes: int, max_depth: int, num_ranks: int) -> None:
    found = paths(published_tree(max_nodes, max_depth, num_ranks))
    whole = paths(published_tree(80, 6, 8))
    kept = [path for path in whole if len(path) <= max_depth and all(rank < num_ranks for rank in path)]
    assert found == kept[:max_nodes]


def test_merged_rows_take_turns_and_a_repeated_candidate_counts_once() -> None:
    rows = np.array([7, 9, 7])
    ids = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 6, 4]])
    logprobs = np.array([[-1, -2, -3, -4], [-1, -2, -3, -4], [-1.5, -2.5, -3.5, -4.5]], dtype=np.float32)
    tokens, new_ids, new = merged(rows, ids, logprobs)
    assert tokens.tolist() == [7, 9]
    assert new_ids.tolist() == [[1, 1, 3, 4], [5, 6, 7, 8]]
    assert new.tolist() == [[-1.0, UNKNOWN, -3.0, -4.5], [-1.0, -2.0, -3.0, -4.0]]
