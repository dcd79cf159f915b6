"""The first of two levels: what proposes trees cheaply, before the target with a partial cache checks them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from worker.drafters.draft import Draft
from worker.sequence import Sequence
from worker.tree import DraftTree


@dataclass(frozen=True)
class Proposal:
    """A tree below a draft's newest token; `is_reused[i]`: node i was proposed by token reuse alone."""

    tree: DraftTree = field(default_factory=DraftTree)
    is_reused: list[bool] = field(default_factory=list)


class Proposer(ABC):
    """Serves all sequences of one worker, as a `Drafter` does."""

    @abstractmethod
    def start(self, sequence: Sequence) -> None:
        """Take in a new or resumed sequence."""

    @abstractmethod
    def propose(self, draft: Draft, max_nodes: int, max_depth: int) -> Proposal:
        """Propose at most `max_nodes` nodes, none deeper than `max_depth`; may be empty. Changes no state."""

    @abstractmethod
    def update(self, sequence: Sequence) -> None:
        """Take in what was committed to the sequence."""

    @abstractmethod
    def stop(self, sequence: Sequence) -> None:
        """Forget a sequence."""
