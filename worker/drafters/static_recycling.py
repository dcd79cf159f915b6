"""Token Recycling as published (Luo et al. 2024): a matrix of candidates fills a static tree at every step."""

from __future__ import annotations

import heapq
from functools import lru_cache
from pathlib import Path

import numpy as np

from swiftbatch.worker.drafters.drafter_interface import ReadRows, TreeDrafter
from swiftbatch.worker.drafters.engine_options import RecyclingOptions
from swiftbatch.worker.drafters.ranking import CandidateRanker
from swiftbatch.worker.drafters.token_recycling import UNKNOWN, RecyclingMatrix
from swiftbatch.worker.forward.step_costs import Costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree, Verification
from swiftbatch.worker.sampling.sequence import Sequence

Shape = tuple[tuple[int, int, int], ...]
"""A static tree, breadth-first: each node's parent, depth, and rank among the parent's candidates."""

# Children of each node of the paper's figure 5, layer by layer; nodes after the last number have none.
PUBLISHED_CHILDREN = (
    (8,),
    (8, 4, 3, 2, 1, 1, 1, 1),
    (8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1),
    (5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1),
    (3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1),
    (2, 0, 0, 1),
)
# Share of steps whose token was the matrix's candidate of this rank: the embedded model on six books, the mean of T = 0
# and T = 1 with min-p 0.1, 2,000 steps.
ACCEPTED_BY_RANK = (0.386, 0.076, 0.023, 0.013, 0.006, 0.005, 0.003, 0.002)


def token_recycling_paper(
    target: TargetModel, costs: Costs, parts_folder: Path | None, options: RecyclingOptions
) -> StaticTokenRecyclingDrafter:
    return StaticTokenRecyclingDrafter(target, options)


class StaticTokenRecyclingDrafter(TreeDrafter):
    """Fills a static tree breadth-first from the matrix."""

    needs_top_k = learns_rows = True

    def __init__(self, target: TargetModel, options: RecyclingOptions) -> None:
        self._matrix = RecyclingMatrix(target.vocab_size, options.candidates, new_share=1.0)
        self._options = options

    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        tree, ranker = DraftTree(), CandidateRanker(sequence)
        candidates: dict[int, list[int]] = {}
        node_of = {ROOT: ROOT}  # node of the shape -> node of the tree; some lack candidates
        for shape_node, (shape_parent, depth, rank) in enumerate(self._shape(max_nodes, max_depth)):
            parent = node_of.get(shape_parent)
            if parent is None:
                continue
            if parent not in candidates:
                token_id = int(sequence.token_ids[-1]) if parent == ROOT else tree.token_ids[parent]
                candidates[parent] = self._candidates(ranker, token_id, depth)
            if rank < len(candidates[parent]):
                node_of[shape_node] = len(tree)
                tree.token_ids.append(candidates[parent][rank])
                tree.parents.append(parent)
        return tree

    def learn(self, rows: ReadRows) -> None:
        self._write(rows.token_ids, rows.top_ids, rows.top_logprobs)

    def update(self, sequence: Sequence, verification: Verification) -> None:
        if verification.top_ids is not None and verification.top_logprobs is not None:
            self._write(np.array(verification.row_token_ids), verification.top_ids, verification.top_logprobs)

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        return {"recycling_ids": self._matrix.ids.copy(), "recycling_logprobs": self._matrix.logprobs.copy()}

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        missing = self.state(sequence).keys() - state.keys()
        if missing:
            raise ValueError(f"recycling matrix: the state lacks {', '.join(sorted(missing))}")
        matrix = state["recycling_ids"], state["recycling_logprobs"]
        self._matrix.check(*matrix, len(self._matrix.ids))
        self._matrix.load(*matrix)

    def _shape(self, max_nodes: int, max_depth: int) -> Shape:
        limits = min(max_nodes, self._options.max_nodes), min(max_depth, self._options.max_depth)
        if self._options.tree == "published":
            return published_tree(*limits, self._options.candidates)
        return measured_tree(*limits, self._options.candidates)

    def _candidates(self, ranker: CandidateRanker, token_id: int, depth: int) -> list[int]:
        ids, logprobs = self._matrix.row(token_id)
        return [token for _, token in ranker.rank(depth, ids, logprobs)] if self._options.with_noise else ids

    def _write(self, rows: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Overwrite the candidates of tokens `rows`; a token may be in several of them."""
        if self._options.update == "first":
            rows, ids, logprobs = rows[::-1], ids[::-1], logprobs[::-1]  # the last row of a token counts
        elif self._options.update == "merged":
            rows, ids, logprobs = merged(rows, ids, logprobs)
        self._matrix.write(rows, ids, logprobs)


def merged(rows: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mix the rows of each token, as concurrent writes of a GPU may: place `j` comes from the row `j mod number`.

    A candidate that this repeats counts once.
    """
    tokens = np.unique(rows)
    new_ids, new = np.empty((len(tokens), ids.shape[1]), ids.dtype), np.empty((len(tokens), ids.shape[1]), np.float32)
    places = np.arange(ids.shape[1])
    for index, token in enumerate(tokens):
        own = np.flatnonzero(rows == token)
        sources = own[places % len(own)]
        new_ids[index], new[index] = ids[sources, places], logprobs[sources, places]
        _, firsts = np.unique(new_ids[index], return_index=True)
        new[index, np.setdiff1d(places, firsts)] = UNKNOWN
    return tokens, new_ids, new


@lru_cache
def published_tree(max_nodes: int, max_depth: int, num_ranks: int) -> Shape:
    """Return the tree of figure 5, cut to its first nodes and to the best `num_ranks` candidates of each node."""
    shape: list[tuple[int, int, int]] = []
    layer: list[int | None] = [ROOT]  # nodes of the shape; None: cut away
    for depth, counts in enumerate(PUBLISHED_CHILDREN[:max_depth], start=1):
        children: list[int | None] = []
        for parent, count in zip(layer, counts, strict=False):
            for rank in range(count):
                is_kept = parent is not None and rank < num_ranks and len(shape) < max_nodes
                children.append(len(shape) if is_kept else None)
                if is_kept and parent is not None:
                    shape.append((parent, depth, rank))
        layer = children
    return tuple(shape)


@lru_cache
def measured_tree(max_nodes: int, max_depth: int, num_ranks: int) -> Shape:
    """Return the tree of at most `max_nodes` nodes of most worth: the product of the acceptance rates along their path.

    Smaller trees are parts of larger ones, and early candidates get more children and longer paths.
    """
    rates = ACCEPTED_BY_RANK[:num_ranks]
    queue: list[tuple[float, tuple[int, ...]]] = [(-rates[0], (0,))] if max_depth > 0 else []
    paths: list[tuple[int, ...]] = []
    while queue and len(paths) < max_nodes:
        worth, path = heapq.heappop(queue)
        paths.append(path)
        if path[-1] + 1 < len(rates):
            sibling_worth = worth / rates[path[-1]] * rates[path[-1] + 1]
            heapq.heappush(queue, (sibling_worth, (*path[:-1], path[-1] + 1)))
        if len(path) < max_depth:
            heapq.heappush(queue, (worth * rates[0], (*path, 0)))
    paths.sort(key=lambda path: (len(path), path))
    index = {path: node for node, path in enumerate(paths)} | {(): ROOT}
    return tuple((index[path[:-1]], len(path), path[-1]) for path in paths)
