"""The first of two levels: what proposes trees cheaply, before the target with a partial cache checks them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from worker.drafters.base import Learner
from worker.drafters.two_level.draft import Draft
from worker.sequence import Sequence
from worker.tree import DraftTree


class Proposer(Learner, ABC):
    """Proposes for drafts in the making."""

    node_seconds: float = 0.0  # that every proposed node takes

    @abstractmethod
    def start(self, sequence: Sequence) -> None:
        """Take in a new or resumed sequence."""

    @abstractmethod
    def propose(self, drafts: list[Draft], limits: list[tuple[int, int]]) -> list[DraftTree]:
        """Trees below the newest tokens of several drafts, each within its limits: (most nodes, greatest depth).

        They may be empty. Changes no state.
        """
