"""Static trees of token recycling: fixed shapes, filled from the matrix layer by layer (Luo et al. 2024, 3.2)."""

from __future__ import annotations

import heapq
from functools import lru_cache

from swiftbatch.worker.drawing.tree import ROOT

MAX_LAYERS = 6  # layers below and with the root: the paper's depth
MAX_NODES = 79  # with the root the paper's 80
NUM_RANKS = 8

# Share of steps whose token was the matrix's candidate of this rank: the embedded model on six books, the mean of T = 0
# and T = 1 with min-p 0.1, 2,000 steps.
ACCEPTED_BY_RANK = (0.386, 0.076, 0.023, 0.013, 0.006, 0.005, 0.003, 0.002)


@lru_cache
def static_tree(max_nodes: int, max_depth: int) -> tuple[tuple[int, int, int], ...]:
    """The shape of at most `max_nodes` nodes, breadth-first: (parent, depth, rank among the parent's candidates).

    A node's worth is the product of the acceptances by rank along its path; the shape holds the nodes of most worth.
    So smaller shapes are parts of larger ones, and early candidates get more children and longer paths.
    """
    num_nodes, num_layers = min(max_nodes, MAX_NODES), min(max_depth, MAX_LAYERS - 1)
    queue: list[tuple[float, tuple[int, ...]]] = [(-ACCEPTED_BY_RANK[0], (0,))] if num_layers > 0 else []
    paths: list[tuple[int, ...]] = []
    while queue and len(paths) < num_nodes:
        worth, path = heapq.heappop(queue)
        paths.append(path)
        if path[-1] + 1 < NUM_RANKS:
            sibling_worth = worth / ACCEPTED_BY_RANK[path[-1]] * ACCEPTED_BY_RANK[path[-1] + 1]
            heapq.heappush(queue, (sibling_worth, (*path[:-1], path[-1] + 1)))
        if len(path) < num_layers:
            heapq.heappush(queue, (worth * ACCEPTED_BY_RANK[0], (*path, 0)))
    paths.sort(key=lambda path: (len(path), path))
    index = {path: node for node, path in enumerate(paths)} | {(): ROOT}
    return tuple((index[path[:-1]], len(path), path[-1]) for path in paths)
