"""The first of two levels: what proposes trees cheaply, before the target with a partial cache checks them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np

from worker.drafters.two_level.draft import Draft
from worker.sequence import Sequence
from worker.tree import DraftTree
from worker.verification import Verification


@dataclass(frozen=True)
class Proposal:
    """A tree below a draft's newest token; `is_reused[i]`: node i was proposed by token reuse alone."""

    tree: DraftTree = field(default_factory=DraftTree)
    is_reused: list[bool] = field(default_factory=list)


class Proposer(ABC):
    """Serves all sequences of one worker, as a `Drafter` does."""

    needs_top_k: bool = False  # whether the target's candidates at every verified row are wanted
    needs_hidden: bool = False  # whether the target's hidden states are
    node_seconds: float = 0.0  # that every proposed node takes

    @abstractmethod
    def start(self, sequence: Sequence) -> None:
        """Take in a new or resumed sequence."""

    @abstractmethod
    def propose(self, drafts: list[Draft], limits: list[tuple[int, int]]) -> list[Proposal]:
        """Propose for several sequences, each within its limits: (most nodes, greatest depth). Changes no state.

        Proposals may be empty.
        """

    @abstractmethod
    def update(self, sequence: Sequence, verification: Verification) -> None:
        """Learn from a full verification, after its tokens were committed to the sequence."""

    def learn(  # noqa: B027
        self, previous_ids: np.ndarray, row_token_ids: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray
    ) -> None:
        """As `Drafter.learn`."""

    @abstractmethod
    def stop(self, sequence: Sequence) -> None:
        """Forget a sequence."""

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        """As `Drafter.state`."""
        return {}

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:  # noqa: B027
        """As `Drafter.restore`."""
