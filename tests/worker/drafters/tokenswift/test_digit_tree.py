"""Digit trees with merged n-grams against a brute-force product."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from bench.long import by_ngrams_alone
from swiftbatch.worker.drafters.tokenswift.tokenswift import Ranked, Sources, digit_tree
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree
from tests.work_counts import num_lines

Paths = dict[tuple[int, ...], float]
EVERYTHING = 10_000


def brute_force(
    levels: list[Ranked], digits: tuple[int, ...], ngrams: list[Ranked]
) -> tuple[Paths, set[tuple[int, ...]]]:
    """Return the merged tree's path confidences, and the digits' nodes."""
    edges: Paths = {}
    used = [level[:digit] for level, digit in zip(levels, digits, strict=False)]
    products = [path for depth in range(1, len(used) + 1) for path in itertools.product(*used[:depth])]
    digit_nodes = {tuple(token for _, token in path) for path in products}
    prefixes = [ngram[:end] for ngram in ngrams for end in range(1, len(ngram) + 1)]
    for path in [*products, *prefixes]:
        node = tuple(token for _, token in path)
        edges[node] = max(edges.get(node, -math.inf), path[-1][0])
    return {node: sum(edges[node[:end]] for end in range(1, len(node) + 1)) for node in edges}, digit_nodes


def node_paths(tree: DraftTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
    return paths


def sources(levels: list[Ranked], digits: tuple[int, ...], ngrams: list[Ranked]) -> Sources:
    return Sources([level[:digit] for level, digit in zip(levels, digits, strict=False)], ngrams)


def grown(
    levels: list[Ranked], digits: tuple[int, ...], ngrams: list[Ranked], max_nodes: int, max_depth: int
) -> tuple[DraftTree, list[bool]]:
    """Return the tree, and which nodes only n-grams proposed."""
    made_of = sources(levels, digits, ngrams)
    tree = digit_tree(made_of, max_nodes, max_depth)
    return tree, [by_ngrams_alone(path, made_of)[-1] for path in node_paths(tree)]


def random_case(seed: int) -> tuple[list[Ranked], tuple[int, ...], list[Ranked]]:
    rng = random.Random(seed)
    levels = [
        sorted(((-rng.expovariate(1.0), token) for token in rng.sample(range(9), 5)), reverse=True) for _ in range(4)
    ]
    digits = rng.choice([(1, 3, 3, 3), (3, 3, 3, 3), (2, 4), (1, 9, 1)])
    ngrams = [
        [(-rng.expovariate(0.7), rng.randrange(9)) for _ in range(rng.randint(1, 6))] for _ in range(rng.choice([0, 6]))
    ]
    return levels, digits, ngrams


@pytest.mark.parametrize("seed", range(60))
def test_it_keeps_the_likeliest_nodes_of_product_and_ngrams(seed: int) -> None:
    levels, digits, ngrams = random_case(seed)
    expected, digit_nodes = brute_force(levels, digits, ngrams)
    for max_nodes, max_depth in ((EVERYTHING, 9), (12, 9), (7, 2)):
        allowed = sorted((confidence for node, confidence in expected.items() if len(node) <= max_depth), reverse=True)
        tree, only_ngram = grown(levels, digits, ngrams, max_nodes, max_depth)
        paths = node_paths(tree)
        assert len(set(paths)) == len(paths)
        assert [expected[path] for path in paths] == pytest.approx(allowed[:max_nodes])
        assert only_ngram == [path not in digit_nodes for path in paths]
        assert all(parent < node for node, parent in enumerate(tree.parents))


def test_the_papers_tree_has_forty_nodes() -> None:
    levels = [[(-0.1 * rank - 0.5, rank) for rank in range(8)] for _ in range(4)]
    tree, only_ngram = grown(levels, (1, 3, 3, 3), [], EVERYTHING, 9)
    assert [tree.depths().count(depth) for depth in range(1, 6)] == [1, 3, 9, 27, 0]
    assert not any(only_ngram)


def test_an_ngram_on_the_digits_adds_no_node_and_keeps_the_higher_confidence() -> None:
    levels = [[(-0.5, 1)], [(-1.0, 2), (-4.0, 3)]]
    tree, only_ngram = grown(levels, (1, 2), [[(-2.0, 1), (-0.2, 3)]], EVERYTHING, 9)
    assert (tree.token_ids, tree.parents) == ([1, 3, 2], [ROOT, 0, 0])
    assert only_ngram == [False, False, False]


def test_no_digits_hang_below_a_node_that_only_an_ngram_proposed() -> None:
    levels = [[(-0.5, 1)], [(-0.5, 2)], [(-0.5, 3)]]
    tree, only_ngram = grown(levels, (1, 1, 1), [[(-0.5, 1), (-2.0, 8)]], EVERYTHING, 9)
    assert node_paths(tree) == [(1,), (1, 2), (1, 2, 3), (1, 8)]
    assert only_ngram == [False, False, False, True]


def test_nothing_proposed_or_nothing_allowed_is_an_empty_tree() -> None:
    assert grown([], (1, 3), [], 10, 9) == (DraftTree(), [])
    assert grown([[]], (1, 3), [[]], 10, 9) == (DraftTree(), [])
    assert grown([[(-0.5, 1)]], (1, 3), [], 0, 9) == (DraftTree(), [])
    assert grown([[(-0.5, 1)]], (1, 3), [], 10, 0) == (DraftTree(), [])


def test_ngrams_alone_make_a_tree() -> None:
    tree, only_ngram = grown([], (), [[(-0.1, 4), (-0.2, 5)], [(-0.1, 4), (-0.3, 6)]], 10, 9)
    assert node_paths(tree) == [(4,), (4, 5), (4, 6)]
    assert only_ngram == [True, True, True]


def test_what_is_recycled_as_well_is_no_ngram_s_alone() -> None:
    found = Sources([], [[(-0.1, 4), (-0.2, 5), (-0.3, 6)]], lambda path: [(-0.5, 5)] if path == (4,) else [(-0.5, 9)])
    assert node_paths(digit_tree(found, 6, 3))[:4] == [(4,), (4, 5), (9,), (4, 5, 6)]
    assert by_ngrams_alone((4, 5, 6), found) == [True, True, True]  # below a node that only an n-gram proposed
    assert by_ngrams_alone((9, 9), found) == [False, False]
    assert by_ngrams_alone((4, 9), found) == [True, False]


def test_forty_nodes_and_twenty_ngrams_take_little() -> None:
    rng = random.Random(1)
    levels = [[(-0.3 - rank, rng.randrange(10_000)) for rank in range(8)] for _ in range(4)]
    ngrams = [[levels[0][0]] + [(-rng.expovariate(1.0), rng.randrange(99)) for _ in range(3)] for _ in range(20)]
    found = sources(levels, (1, 3, 3, 3), ngrams)
    assert len(digit_tree(found, 40, 9)) == 40
    assert num_lines(lambda: digit_tree(found, 40, 9)) < 10_000  # now 2,000; all combinations would take far more
