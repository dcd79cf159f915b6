"""The engines that benchmarks compare: the user's, and variants as the papers have them or with a part left out."""

from __future__ import annotations

import functools
import heapq
from functools import lru_cache
from pathlib import Path

import numpy as np

from bench.compared_caches import ImportanceKVCache, RetrievalKVCache
from swiftbatch.worker.decode_bench import BY_NAME as BY_NAME
from swiftbatch.worker.drafters.catalogue import ENGINES, DrafterFactory
from swiftbatch.worker.drafters.choice.choosing_drafter import with_trees
from swiftbatch.worker.drafters.drafter_interface import Drafter, ReadRows, TreeDrafter
from swiftbatch.worker.drafters.griffin.griffin import GriffinOptions, griffin
from swiftbatch.worker.drafters.ranking import CandidateRanker
from swiftbatch.worker.drafters.token_recycling import RecyclingMatrix, token_recycling
from swiftbatch.worker.drafters.tokenswift.tokenswift import TokenSwiftOptions, tokenswift
from swiftbatch.worker.drafters.triforce import TriForceOptions, triforce
from swiftbatch.worker.forward.step_costs import Costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.sampling.draft_tree import ROOT, TOP_K, DraftTree, Verification
from swiftbatch.worker.sampling.sequence import Sequence

MAX_LAYERS = 6  # layers below and with the root: the paper's depth
MAX_NODES = 79  # with the root the paper's 80
NUM_RANKS = 8
# Share of steps whose token was the matrix's candidate of this rank: the embedded model on six books, the mean of T = 0
# and T = 1 with min-p 0.1, 2,000 steps.
ACCEPTED_BY_RANK = (0.386, 0.076, 0.023, 0.013, 0.006, 0.005, 0.003, 0.002)


class StaticTokenRecyclingDrafter(TreeDrafter):
    """Fills the static tree breadth-first from the matrix; each node's candidates are ranked with the noise.

    Alone it is the paper's tree of 80 nodes, root included: three tiles of rows, made for a GPU.
    """

    needs_top_k = True

    def __init__(self, target: TargetModel, *_: object) -> None:
        self._matrix = RecyclingMatrix(target.vocab_size, TOP_K, new_share=1.0)

    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        ranker = CandidateRanker(sequence)
        tree = DraftTree()
        ranked: dict[int, list[tuple[float, int]]] = {}
        node_of = {ROOT: ROOT}  # node of the shape -> node of the tree; some lack candidates
        for shape_node, (shape_parent, depth, rank) in enumerate(static_tree(max_nodes, max_depth)):
            parent = node_of.get(shape_parent)
            if parent is None:
                continue
            if parent not in ranked:
                token_id = int(sequence.token_ids[-1]) if parent == ROOT else tree.token_ids[parent]
                ranked[parent] = ranker.rank(depth, *self._matrix.row(token_id))
            if rank < len(ranked[parent]):
                node_of[shape_node] = len(tree)
                tree.token_ids.append(ranked[parent][rank][1])
                tree.parents.append(parent)
        return tree

    def learn(self, rows: ReadRows) -> None:
        self._matrix.write(rows.token_ids, rows.top_ids, rows.top_logprobs)

    def update(self, sequence: Sequence, verification: Verification) -> None:
        if verification.top_ids is not None and verification.top_logprobs is not None:
            self._matrix.write(np.array(verification.row_token_ids), verification.top_ids, verification.top_logprobs)

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        return {"recycling_ids": self._matrix.ids.copy(), "recycling_logprobs": self._matrix.logprobs.copy()}

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        missing = self.state(sequence).keys() - state.keys()
        if missing:
            raise ValueError(f"recycling matrix: the state lacks {', '.join(sorted(missing))}")
        matrix = state["recycling_ids"], state["recycling_logprobs"]
        self._matrix.check(*matrix, len(self._matrix.ids))
        self._matrix.load(*matrix)


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


STATIC_VARIANTS: dict[str, DrafterFactory] = {
    "token-recycling-static": lambda target, costs, _: with_trees(StaticTokenRecyclingDrafter(target), costs),
    "token-recycling-static-80": StaticTokenRecyclingDrafter,
    "token-recycling-no-noise": functools.partial(token_recycling, with_noise=False),
}


TOKENSWIFT_PAPER = TokenSwiftOptions(cache=ImportanceKVCache, budget=4096, draft_rounds=1, recycles=False)
TRIFORCE_PAPER = TriForceOptions(cache=RetrievalKVCache, budget=4096, gammas=(2, 6))
GRIFFIN_PAPER = GriffinOptions(is_full=True)
VARIANTS: dict[str, DrafterFactory] = STATIC_VARIANTS | {
    "tokenswift-paper": functools.partial(tokenswift, options=TOKENSWIFT_PAPER),
    "triforce-paper": functools.partial(triforce, options=TRIFORCE_PAPER),
    "griffin-paper": functools.partial(griffin, options=GRIFFIN_PAPER),
}
BENCH_ENGINES: dict[str, DrafterFactory] = {name: entry.factory() for name, entry in ENGINES.items()} | VARIANTS
BY_NAME.update(VARIANTS)


def create_bench_drafter(name: str, target: TargetModel, costs: Costs, parts_folder: Path | None = None) -> Drafter:
    """Create a drafter as `create_drafter` does, for variants, too."""
    return BY_NAME[name](target, costs, parts_folder)
