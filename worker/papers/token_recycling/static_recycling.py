"""Token recycling as the paper has it (Luo et al. 2024): static trees, rows of 8 candidates that are overwritten."""

from __future__ import annotations

import numpy as np

from swiftbatch.worker.drafters.base import ReadRows
from swiftbatch.worker.drafters.ranking import CandidateRanker
from swiftbatch.worker.drafters.recycling.recycling_matrix import RecyclingMatrix
from swiftbatch.worker.drafters.recycling.token_recycling import top_candidates_of
from swiftbatch.worker.drafters.shared_budget import BudgetedDrafter
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.drawing.tree import ROOT, DraftTree
from swiftbatch.worker.drawing.verification import TOP_K, Verification
from swiftbatch.worker.papers.token_recycling.static_tree import static_tree
from swiftbatch.worker.target.step_costs import Costs
from swiftbatch.worker.target.target import TargetModel


class StaticTokenRecyclingDrafter(BudgetedDrafter):
    """Fills the static tree breadth-first from the matrix; each node's candidates are ranked with the noise.

    Without `costs` it is the paper's tree of 80 nodes, root included: three tiles of rows, made for a GPU.
    """

    needs_top_k = True

    def __init__(self, target: TargetModel, costs: Costs | None, *_: object) -> None:
        super().__init__(costs)
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
        super().update(sequence, verification)
        self._matrix.write(verification.row_token_ids, *top_candidates_of(verification))

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        return {"recycling_ids": self._matrix.ids.copy(), "recycling_logprobs": self._matrix.logprobs.copy()}

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        missing = self.state(sequence).keys() - state.keys()
        if missing:
            raise ValueError(f"recycling matrix: the state lacks {', '.join(sorted(missing))}")
        matrix = state["recycling_ids"], state["recycling_logprobs"]
        self._matrix.check(*matrix, len(self._matrix.ids))
        self._matrix.load(*matrix)
