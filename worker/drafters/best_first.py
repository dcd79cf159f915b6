"""Best-first draft trees: of all nodes that could come next, the one whose path is likeliest is added."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TypeVar

from swiftbatch.worker.drawing.tree import ROOT, DraftTree

Context = TypeVar("Context")
Expand = Callable[[Context, int], list[tuple[float, int, Context]]]
"""(context, depth) -> candidates at that depth, best first: (log-confidence given the parent, token, next context)."""


def grow_best_first(root_context: Context, expand: Expand[Context], max_nodes: int, max_depth: int) -> DraftTree:
    """Grow a tree of at most `max_nodes` nodes and depth at most `max_depth`.

    A context is whatever the drafter's `expand` looks candidates up with: a token, a state. Each node waits in the
    queue alone for its siblings: the next one enters when it leaves. So a tree of n nodes takes n expansions at most.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    # (-log-confidence of the path, tie-breaker, parent, depth, siblings, place among them, that of the parent's path)
    queue: list[tuple[float, int, int, int, list[tuple[float, int, Context]], int, float]] = []
    num_pushed = 0

    def push(parent: int, depth: int, siblings: list[tuple[float, int, Context]], place: int, path: float) -> None:
        nonlocal num_pushed
        if place < len(siblings):
            num_pushed += 1
            heapq.heappush(queue, (-path - siblings[place][0], num_pushed, parent, depth, siblings, place, path))

    if max_nodes > 0 and max_depth > 0:
        push(ROOT, 1, expand(root_context, 1), 0, 0.0)
    while queue and len(token_ids) < max_nodes:
        cost, _, parent, depth, siblings, place, path = heapq.heappop(queue)
        _, token, context = siblings[place]
        token_ids.append(token)
        parents.append(parent)
        push(parent, depth, siblings, place + 1, path)
        if depth < max_depth and len(token_ids) < max_nodes:
            push(len(token_ids) - 1, depth + 1, expand(context, depth + 1), 0, -cost)
    return DraftTree(token_ids, parents)
