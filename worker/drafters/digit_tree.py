"""Draft trees of digits, with n-grams merged in (TokenSwift 3.2 and appendix B.2).

A configuration such as 1,3,3,3 is the full tree in which every node of depth d has as many children as digit d + 1
says: the best candidates of that depth, the same under every parent, as heads that know no parent predict them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from worker.drafters.best_first import grow_best_first
from worker.tree import ROOT, DraftTree

Ranked = list[tuple[float, int]]  # (log-confidence, token)
Recycled = Callable[[tuple[int, ...]], Ranked]  # tokens from the root -> candidates behind them
Branches = list[dict[int, tuple[float, int]]]  # a prefix tree: per node, token -> (log-confidence, node)

_OUTSIDE = 0  # the node of the prefix tree that has no n-grams below it
_TOP = 1  # its root


class _Context(NamedTuple):
    """Where a node stands: its path, its node of the prefix tree, and whether the digits go on below it."""

    path: tuple[int, ...]
    node: int
    in_digits: bool


def digit_tree(
    levels: list[Ranked],
    digits: tuple[int, ...],
    ngrams: list[Ranked],
    max_nodes: int,
    max_depth: int,
    recycled: Recycled | None = None,
) -> tuple[DraftTree, list[bool]]:
    """The tree of `digits`, the paths of `ngrams` and what `recycled` knows in one prefix tree, its likeliest nodes.

    `levels[d]` are distinct candidates of depth d + 1, best first: (log-confidence at most 0, token); the first
    `digits[d]` stand under every node of the digits at depth d. Each of `ngrams` is a path from the root. Where a node
    is proposed more than once, the highest confidence counts. Kept are the `max_nodes` nodes of highest path
    confidence (the sum from the root), none deeper than `max_depth`, parents before children. The second result
    says of every node whether an n-gram alone proposed it.
    """
    branches = _prefix_tree(ngrams)
    used = _cut(levels, digits)
    only_ngrams: dict[tuple[int, ...], bool] = {(): False}  # of every path looked at

    def expand(context: _Context, depth: int) -> list[tuple[float, int, _Context]]:
        path, node, in_digits = context
        level = dict(_by_token(used[depth - 1])) if in_digits and depth <= len(used) else {}
        branch = branches[node]
        others = dict(_by_token(recycled(path))) if recycled else {}
        found = [
            (max(source[token] for source in (level, others) if token in source), token)
            for token in level.keys() | others.keys()
            if token not in branch
        ]
        for token, (confidence, _) in branch.items():
            found.append((max(confidence, level.get(token, confidence), others.get(token, confidence)), token))
            only_ngrams[(*path, token)] = only_ngrams[path] or (token not in level and token not in others)
        for _, token in found:
            only_ngrams.setdefault((*path, token), False)
        nodes = {token: child for token, (_, child) in branch.items()}
        return [
            (confidence, token, _Context((*path, token), nodes.get(token, _OUTSIDE), token in level))
            for confidence, token in sorted(found, reverse=True)
        ]

    tree = grow_best_first(_Context((), _TOP, True), expand, max_nodes, max_depth)
    return tree, [only_ngrams.get(path, False) for path in _paths(tree)]


def _by_token(ranked: Ranked) -> Iterator[tuple[int, float]]:
    return ((token, confidence) for confidence, token in ranked)


def _paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from the root to every node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
    return paths


def _cut(levels: list[Ranked], digits: tuple[int, ...]) -> list[Ranked]:
    return [level[:digit] for level, digit in zip(levels, digits, strict=False)]


def _prefix_tree(ngrams: list[Ranked]) -> Branches:
    branches: Branches = [{}, {}]
    for ngram in ngrams:
        node = _TOP
        for logconf, token in ngram:
            known = branches[node].get(token)
            child = known[1] if known else len(branches)
            if not known:
                branches.append({})
            if not known or known[0] < logconf:
                branches[node][token] = (logconf, child)
            node = child
    return branches
