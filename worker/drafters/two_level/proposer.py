"""The first of two levels: what proposes trees cheaply, before the target with a partial cache checks them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from swiftbatch.worker.drafters.base import Learner
from swiftbatch.worker.drafters.two_level.chain import Chain
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.drawing.tree import DraftTree


class Proposer(Learner, ABC):
    """Proposes behind chains, or behind sequences that have none yet."""

    @abstractmethod
    def start(self, sequence: Sequence) -> None:
        """Take in a new or resumed sequence."""

    @abstractmethod
    def propose(self, chains: list[Chain], limits: list[tuple[int, int]]) -> list[DraftTree]:
        """Trees below the newest tokens of several chains, each within its limits: (most nodes, greatest depth).

        They may be empty. Changes no state.
        """
