"""Parts for tests of drafters: costs that are the same on every machine, and one tree from the contract's list."""

from __future__ import annotations

import numpy as np

from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest
from swiftbatch.worker.drawing.draft_tree import DraftTree
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.target.step_costs import StepCosts


def free_rows() -> StepCosts:
    """Rows cost nothing, so that all nodes pay; forwards take so long that what drafting takes is no matter."""
    return StepCosts((64, 8192), np.array([[4.0] * 6, [5.0] * 6]))


def proposed(drafter: Drafter, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
    """What a drafter proposes for a sequence alone."""
    [tree] = drafter.propose([DraftRequest(sequence, max_nodes, max_depth)])
    return tree
