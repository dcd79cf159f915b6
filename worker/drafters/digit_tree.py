"""Draft trees of digits, with n-grams merged in (TokenSwift 3.2 and appendix B.2).

A configuration such as 1,3,3,3 is the full tree in which every node of depth d has as many children as digit d + 1
says: the best candidates of that depth, the same under every parent, as heads that know no parent predict them.
"""

from __future__ import annotations

from worker.drafters.best_first import grow_best_first
from worker.tree import ROOT, DraftTree

Ranked = list[tuple[float, int]]  # (log-confidence, token)
Branches = list[dict[int, tuple[float, int]]]  # a prefix tree: per node, token -> (log-confidence, node)

_OUTSIDE = 0  # the node of the prefix tree that has no n-grams below it
_TOP = 1  # its root


def parse_digits(text: str) -> tuple[int, ...]:
    """Children per node and depth, from a text such as "1,3,3,3". Raises ValueError with one line for the user."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"tree digits {text!r}: expected positive whole numbers with commas between, such as 1,3,3,3")
    return tuple(int(part) for part in parts)


def digit_tree(
    levels: list[Ranked], digits: tuple[int, ...], ngrams: list[Ranked], max_nodes: int, max_depth: int
) -> tuple[DraftTree, list[bool]]:
    """The tree of `digits` and the paths of `ngrams` in one prefix tree, cut down to its likeliest nodes.

    `levels[d]` are distinct candidates of depth d + 1, best first: (log-confidence at most 0, token); the first
    `digits[d]` stand under every node of the digits at depth d. Each of `ngrams` is a path from the root. Where a node
    is proposed more than once, the higher confidence counts. Kept are the `max_nodes` nodes of highest path
    confidence (the sum from the root), none deeper than `max_depth`, parents before children. The second result
    says of every node whether an n-gram alone proposed it.
    """
    branches = _prefix_tree(ngrams)
    # A context is 2 * (node of the prefix tree) + (whether the digits go on below).
    used = [[(logconf, token, 2 * _OUTSIDE + 1) for logconf, token in level] for level in _cut(levels, digits)]

    def expand(context: int, depth: int) -> list[tuple[float, int, int]]:
        node, in_digits = context >> 1, context & 1
        level = used[depth - 1] if in_digits and depth <= len(used) else []
        branch = branches[node]
        if not branch:
            return level
        found = {token: (logconf, token, 2 * child) for token, (logconf, child) in branch.items()}
        for logconf, token, outside in level:
            if token in found:
                found[token] = (max(logconf, found[token][0]), token, found[token][2] + 1)
            else:
                found[token] = (logconf, token, outside)
        return sorted(found.values(), reverse=True)

    tree = grow_best_first(2 * _TOP + 1, expand, max_nodes, max_depth)
    return tree, _only_ngrams(tree, [{token for _, token, _ in level} for level in used])


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


def _only_ngrams(tree: DraftTree, digit_tokens: list[set[int]]) -> list[bool]:
    """For every node whether it lies outside the tree of the digits."""
    only: list[bool] = []
    for token, parent, depth in zip(tree.token_ids, tree.parents, tree.depths(), strict=True):
        parent_only = parent != ROOT and only[parent]
        only.append(parent_only or depth > len(digit_tokens) or token not in digit_tokens[depth - 1])
    return only
