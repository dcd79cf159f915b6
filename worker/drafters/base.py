"""The contract of every drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from worker.caches.full import FullKVCache
from worker.sequence import Sequence
from worker.tree import DraftTree
from worker.verification import Verification


@dataclass(frozen=True)
class DraftRequest:
    """A tree is wanted behind a sequence's end: at most `max_nodes` nodes, none deeper than `max_depth`.

    How many pay is the drafter's to say.
    """

    sequence: Sequence
    max_nodes: int
    max_depth: int
    overhead: float = 0.0  # seconds that a step of the engine takes beside its forward, so far


class Drafter(ABC):
    """Proposes draft trees for the sequences of one worker. Whatever it proposes, the output stays the same.

    One instance serves all sequences of its worker; what it learns from one may help the next (hot start).
    """

    needs_top_k: bool = False  # whether `Verification.top_ids` and `top_logprobs` must be filled
    needs_hidden: bool = False  # whether `Verification.hidden` must be filled

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:  # noqa: B027
        """Take in a new or resumed sequence, whose prompt and committed tokens are there already.

        `cache` is the sequence's own; from the first `propose` on it holds every token but the last.
        """

    @abstractmethod
    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        """Propose for all sequences that share the coming forward. Trees may be empty. Changes no state."""

    def learn(  # noqa: B027
        self, previous_ids: np.ndarray, row_token_ids: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray
    ) -> None:
        """Take in the target's candidates behind tokens that were only read: a prompt, or a replayed output.

        `row_token_ids [num_rows]`, `previous_ids [num_rows]` the tokens before them; `top_ids` and `top_logprobs`
        `[num_rows, TOP_K]` behind them. Called where `needs_top_k`.
        """

    def update(self, sequence: Sequence, verification: Verification) -> None:  # noqa: B027
        """Learn from a verified step, after its tokens were committed to the sequence."""

    def stop(self, sequence: Sequence) -> None:  # noqa: B027
        """Forget a sequence that ended or moved away."""

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        """Arrays that a resumed sequence needs beyond its tokens; empty where the tokens suffice."""
        return {}

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:  # noqa: B027
        """Take back what `state` returned, after `start`. Unfit arrays raise ValueError and change nothing."""
