"""Draft trees of digits, with n-grams merged in (TokenSwift 3.2 and appendix B.2).

A configuration such as 1,3,3,3 is the full tree in which every node of depth d has as many children as digit d + 1
says: the best candidates of that depth, the same under every parent, as heads that know no parent predict them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from swiftbatch.worker.drafters.ranking import grow_best_first
from swiftbatch.worker.drawing.draft_tree import DraftTree

Ranked = list[tuple[float, int]]  # (log-confidence, token)
Recycled = Callable[[tuple[int, ...]], Ranked]  # tokens from the root -> candidates behind them
Branches = list[dict[int, tuple[float, int]]]  # a prefix tree: per node, token -> (log-confidence, node)

_OUTSIDE = 0  # the node of the prefix tree that has no n-grams below it
_TOP = 1  # its root


class Sources(NamedTuple):
    """The sources of candidates behind a chain's newest token."""

    levels: list[Ranked]  # [d] those of depth d + 1 under every node of the digits: distinct ones, best first
    ngrams: list[Ranked]  # each a path from the root
    recycled: Recycled | None = None

    def others(self, path: tuple[int, ...]) -> dict[int, float]:
        """Confidence of every recycled token behind a path."""
        return by_token(self.recycled(path)) if self.recycled else {}


class _Context(NamedTuple):
    """The place of a node: its path, its node of the prefix tree, and whether the digits go on below it."""

    path: tuple[int, ...]
    node: int
    in_digits: bool


def digit_tree(sources: Sources, max_nodes: int, max_depth: int) -> DraftTree:
    """The tree of digits, the paths of n-grams and what is recycled in one prefix tree, its likeliest nodes.

    Where a node is proposed more than once, the highest confidence counts. Kept are the `max_nodes` nodes of highest
    path confidence (the sum from the root), none deeper than `max_depth`, parents before children.
    """
    branches = _prefix_tree(sources.ngrams)
    levels = [by_token(level) for level in sources.levels]

    def expand(context: _Context, depth: int) -> list[tuple[float, int, _Context]]:
        """Candidates below a node, best first, each with the highest confidence that a source has in it."""
        path, node, in_digits = context
        level = levels[depth - 1] if in_digits and depth <= len(levels) else {}
        branch = branches[node]
        confidences = {token: confidence for token, (confidence, _) in branch.items()}
        for source in (level, sources.others(path)):
            for token, confidence in source.items():
                confidences[token] = max(confidence, confidences.get(token, confidence))
        ranked = sorted(((confidence, token) for token, confidence in confidences.items()), reverse=True)
        return [(c, t, _Context((*path, t), branch[t][1] if t in branch else _OUTSIDE, t in level)) for c, t in ranked]

    return grow_best_first(_Context((), _TOP, True), expand, max_nodes, max_depth)


def by_token(ranked: Ranked) -> dict[int, float]:
    """Confidence of every token."""
    return {token: confidence for confidence, token in ranked}


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
