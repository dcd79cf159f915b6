"""The baseline: no drafts, one token a step."""

from __future__ import annotations

from worker.drafters.base import Drafter
from worker.sequence import Sequence
from worker.tree import DraftTree


class AutoregressiveDrafter(Drafter):
    """Proposes nothing, so that every step is plain decoding."""

    def propose(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        return DraftTree()
