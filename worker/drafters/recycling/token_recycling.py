"""Token recycling (Luo et al. 2024): the target's candidates at every verified row are kept and drafted again.

A matrix holds, for every token of the vocabulary, the candidates that the target saw behind it, rejected nodes
included. One matrix serves all jobs of a worker, so that a later job starts hot. Beyond the paper it keeps the
candidates' log-probabilities, which rank them together with the noise of the coming positions; it averages a new row
with the one that stood there, since one context of a token is a poor guess of its next one; and it keeps rows for
pairs of tokens that stood in a text, which count as much as those of the last token alone.
"""

from __future__ import annotations

import numpy as np

from swiftbatch.worker.drafters.base import ReadRows
from swiftbatch.worker.drafters.recycling.recycler import create_recycler
from swiftbatch.worker.drafters.recycling.recycling_tables import RecyclingTables
from swiftbatch.worker.drafters.shared_budget import BudgetedDrafter
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.drawing.tree import DraftTree
from swiftbatch.worker.drawing.verification import Verification
from swiftbatch.worker.target.step_costs import Costs
from swiftbatch.worker.target.target import TargetModel


class TokenRecyclingDrafter(BudgetedDrafter):
    """Best-first trees over averaged rows of tokens and of pairs, ranked with the noise."""

    needs_top_k = True

    def __init__(self, target: TargetModel, costs: Costs | None, *_: object, with_noise: bool = True) -> None:
        super().__init__(costs)
        self.tables = RecyclingTables(target.vocab_size)
        self._recycler = create_recycler(self.tables, with_noise)

    @property
    def wants_candidates(self) -> bool:
        return self.is_drafting

    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        return self._recycler.tree(sequence, max_nodes, max_depth)

    def learn(self, rows: ReadRows) -> None:
        all_rows = np.arange(len(rows.token_ids))
        self._recycler.write(rows.token_ids, rows.top_ids, rows.top_logprobs, all_rows, rows.previous_ids)

    def update(self, sequence: Sequence, verification: Verification) -> None:
        super().update(sequence, verification)
        if verification.top_ids is not None:  # where no drafts pay, nothing is learned for them
            self.take(sequence, verification)

    def take(self, sequence: Sequence, verification: Verification) -> None:
        """Keep the target's candidates at the rows of a verified step, whoever proposed its tree."""
        text_rows = np.array([0, *(node + 1 for node in verification.path)])  # of tokens that stand in the text now
        root = len(sequence) - len(verification.committed_ids) - 1
        previous_ids = sequence.token_ids[[max(root + i - 1, 0) for i in range(len(text_rows))]]
        candidates = top_candidates_of(verification)
        self._recycler.write(verification.row_token_ids, *candidates, text_rows, previous_ids)

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        return self.tables.state()

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        self.tables.restore(state)


def top_candidates_of(verification: Verification) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probabilities of the candidates at every row. ValueError where the step kept none."""
    if verification.top_ids is None or verification.top_logprobs is None:
        raise ValueError("token recycling needs the target's top candidates at every verified row; got none")
    return verification.top_ids, verification.top_logprobs
