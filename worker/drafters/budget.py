"""How many draft nodes pay: the target's measured step costs against the running acceptance.

Nodes are proposed best first, so the share of steps in which node i was accepted tells for every n what n nodes would
have brought. More rows cost little in a short cache and much in a long one; the choice follows both.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from worker.drafters.base import Drafter, DraftRequest
from worker.sequence import Sequence
from worker.target.step_costs import Costs, StepCosts
from worker.target.tiles import TILE_ROWS
from worker.tree import DraftTree
from worker.verification import Verification

NODE_CHOICES = (1, 3, 5, 7, 11, 15, 23, 31)

PRIOR_ACCEPTANCE = 0.6 * 0.75 ** np.arange(TILE_ROWS)  # of node i, before anything was seen
LEARNING_RATE = 0.02
PRIOR_STEPS = 8  # that the prior counts for: short generations learn faster than at the final rate
EXPLORE_EVERY = 24  # steps between two looks at one size more


@dataclass(frozen=True)
class BudgetChoice:
    """A number of draft nodes for each sequence, and the tokens per second of all that it promises."""

    num_nodes: int
    rate: float


class NodeBudget:
    """Chooses the number of draft nodes that gives most tokens per second."""

    def __init__(self, costs: StepCosts, prior_acceptance: np.ndarray = PRIOR_ACCEPTANCE) -> None:
        self._costs = costs
        # Of the first TILE_ROWS nodes, the running share of steps that accepted node i: plain numbers, as few as these
        # are, take a tenth of an array's time.
        self._acceptance: list[float] = prior_acceptance.tolist()
        self._num_steps = 0

    def state(self) -> np.ndarray:
        """What was learned: acceptance per node, then the number of steps, `[TILE_ROWS + 1] float64`."""
        return np.array([*self._acceptance, self._num_steps])

    def restore(self, state: np.ndarray) -> None:
        """Take back what `state` returned. Unfit arrays raise ValueError and change nothing."""
        if state.shape != (TILE_ROWS + 1,) or state.dtype != np.float64 or not np.isfinite(state).all():
            raise ValueError(f"node budget: found {state.dtype} {state.shape}, expected float64 ({TILE_ROWS + 1},)")
        self._acceptance, self._num_steps = state[:TILE_ROWS].tolist(), int(state[TILE_ROWS])

    def observe(self, num_draft_tokens: int, path: list[int]) -> None:
        """Learn from one verified tree whose accepted nodes are `path`."""
        if num_draft_tokens == 0:
            return
        self._num_steps += 1
        rate = max(LEARNING_RATE, 1.0 / (PRIOR_STEPS + self._num_steps))
        for node in range(min(num_draft_tokens, TILE_ROWS)):
            self._acceptance[node] += rate * ((node in path) - self._acceptance[node])

    def best(
        self, length: int, num_sequences: int, overhead: float, node_seconds: float = 0.0, max_nodes: int = TILE_ROWS
    ) -> BudgetChoice:
        """What pays most for each of `num_sequences` sequences that share a forward, at `length` cached tokens.

        `overhead` is what a step costs beside the forward, `node_seconds` what proposing takes for every node of every
        sequence, in seconds.
        """
        room = max(1, min(max_nodes, TILE_ROWS // num_sequences - 1))
        choices = [nodes for nodes in NODE_CHOICES if nodes <= room] or [room]
        accepted = list(accumulate(self._acceptance))  # of the first nodes, in a step
        rates = []
        for nodes in choices:
            proposing = overhead + nodes * num_sequences * node_seconds
            forward = self._costs.forward_seconds(nodes + 1, length, num_sequences)
            rates.append((1.0 + accepted[nodes - 1]) / (forward + proposing))
        best = rates.index(max(rates))
        if self._num_steps % EXPLORE_EVERY == EXPLORE_EVERY - 1:
            best = min(best + 1, len(choices) - 1)
        return BudgetChoice(choices[best], num_sequences * rates[best])


class BudgetedDrafter(Drafter):
    """Drafts for each sequence by itself, with as many nodes as pay."""

    def __init__(self, costs: Costs | None) -> None:
        """Without `costs` trees are as large as they may be."""
        self._budget = None if costs is None else NodeBudget(costs())

    @abstractmethod
    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        """At most `max_nodes` nodes, none deeper than `max_depth`; may be empty."""

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return [self.tree(r.sequence, self._max_nodes(r, len(requests)), r.max_depth) for r in requests]

    def update(self, sequence: Sequence, verification: Verification) -> None:
        if self._budget is not None:
            self._budget.observe(verification.num_draft_tokens, verification.path)

    def _max_nodes(self, request: DraftRequest, num_sequences: int) -> int:
        if self._budget is None:
            return request.max_nodes
        best = self._budget.best(len(request.sequence) - 1, num_sequences, request.overhead)
        return min(request.max_nodes, best.num_nodes)
