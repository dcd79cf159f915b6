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
    sources = _Sources(_cut(levels, digits), _prefix_tree(ngrams), recycled)
    tree = grow_best_first(_Context((), _TOP, True), sources.expand, max_nodes, max_depth)
    return tree, [path in sources.only_ngrams for path in _paths(tree)]


class _Sources:
    """What may follow a node by digits, n-grams and recycled candidates."""

    def __init__(self, levels: list[Ranked], branches: Branches, recycled: Recycled | None) -> None:
        self._levels = levels
        self._branches = branches
        self._recycled = recycled
        self.only_ngrams: set[tuple[int, ...]] = set()  # paths that nothing else proposed

    def expand(self, context: _Context, depth: int) -> list[tuple[float, int, _Context]]:
        """Candidates below a node, best first, each with the highest confidence that a source has in it."""
        path, node, in_digits = context
        level = dict(_by_token(self._levels[depth - 1])) if in_digits and depth <= len(self._levels) else {}
        others = dict(_by_token(self._recycled(path))) if self._recycled else {}
        branch = self._branches[node]
        confidences = {token: confidence for token, (confidence, _) in branch.items()}
        for source in (level, others):
            for token, confidence in source.items():
                confidences[token] = max(confidence, confidences.get(token, confidence))
        is_only = path in self.only_ngrams
        self.only_ngrams |= {(*path, t) for t in branch if is_only or (t not in level and t not in others)}
        ranked = sorted(((confidence, token) for token, confidence in confidences.items()), reverse=True)
        return [(c, t, _Context((*path, t), branch[t][1] if t in branch else _OUTSIDE, t in level)) for c, t in ranked]


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
