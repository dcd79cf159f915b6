"""Finds the tree size with the most tokens per second, from measured step costs and running acceptance rates.

A tree lists its nodes best first, so the acceptance rates by node index predict the tokens of every tree size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from swiftbatch.worker.forward.step_costs import StepCosts
from swiftbatch.worker.kernels.kernel_sizes import TILE_ROWS

NODE_CHOICES = (0, 1, 3, 5, 7, 11, 15, 23, 31)

PRIOR_ACCEPTANCE = 0.6 * 0.75 ** np.arange(TILE_ROWS)  # prior acceptance of node i
LEARNING_RATE = 0.02
PRIOR_STEPS = 8  # weight of the prior in steps: short generations learn faster than at the final rate
MOST_PRIOR_STEPS = 24  # further weight of a prior that other sequences confirmed
EXPLORE_EVERY = 24  # steps between trials of the next larger size
PROBE_EVERY = 8  # steps between trials at first, if nothing is drafted
PROBE_CHOICE = NODE_CHOICES.index(3)  # enough to see a text begin to repeat itself
MOST_DOUBLED = 32  # longest interval between trials, as a multiple of the shortest
PROMISING = 3  # accepted tokens of a trial that shorten the interval again


def together(forward_seconds: float, beside: float) -> float:
    """Return a step's seconds: `beside` may be negative, but a step takes at least half the forward's estimate."""
    return max(forward_seconds + beside, forward_seconds / 2)


@dataclass
class ProbeSchedule:
    """Schedule of trial drafts for a sequence without drafts; after each failed trial, the interval doubles."""

    shortest: int  # steps between two trials
    interval: int = 0  # steps until the next trial
    num_waited: int = 0  # steps without a tree

    def __post_init__(self) -> None:
        self.interval = max(self.interval, self.shortest)

    @property
    def is_due(self) -> bool:
        return self.num_waited >= self.interval

    def observe(self, is_drafted: bool, num_accepted: int = 0) -> None:
        """Count a step. A trial with an empty tree counts as failed."""
        if not is_drafted and not self.is_due:
            self.num_waited += 1
        elif self.num_waited and num_accepted >= PROMISING:  # that was a trial
            self.num_waited, self.interval = 0, self.shortest
        elif self.num_waited:
            self.num_waited, self.interval = 0, min(2 * self.interval, MOST_DOUBLED * self.shortest)
        else:
            self.interval = self.shortest

    def state(self) -> np.ndarray:
        """Return the steps waited and the interval, `[2] float64`."""
        return np.array([self.num_waited, self.interval], dtype=np.float64)

    def restore(self, state: np.ndarray) -> None:
        longest = MOST_DOUBLED * self.shortest
        if state.shape != (2,) or not np.isfinite(state).all() or (state < (0, 1)).any() or state[1] > longest:
            raise ValueError(f"rhythm of looks: found {state}, expected two numbers of steps")
        self.num_waited, self.interval = (int(number) for number in state)


class NodeAcceptance:
    """Running acceptance of the first `TILE_ROWS` nodes."""

    def __init__(self, prior: np.ndarray = PRIOR_ACCEPTANCE, before: NodeAcceptance | None = None) -> None:
        """Continue the schedule and part of the step count of `before`, which belonged to a finished sequence."""
        # for so few values, a list takes a tenth of an array's time
        self.shares: list[float] = prior.tolist()
        self.num_steps: int = min(before.num_steps, MOST_PRIOR_STEPS) if before else 0  # steps with drafts
        self._probes: ProbeSchedule = replace(before._probes) if before else ProbeSchedule(PROBE_EVERY)

    def observe(self, num_draft_tokens: int, path: list[int]) -> None:
        """Learn from a verified tree, perhaps empty, with the accepted nodes `path`."""
        self._probes.observe(num_draft_tokens > 0, len(path))
        self.learn(num_draft_tokens, path)

    def went_by(self, is_drafted: bool, num_accepted: int = 0) -> None:
        self._probes.observe(is_drafted, num_accepted)

    def learn(self, num_draft_tokens: int, path: list[int]) -> None:
        if num_draft_tokens == 0:
            return
        self.num_steps += 1
        rate, shares = max(LEARNING_RATE, 1.0 / (PRIOR_STEPS + self.num_steps)), self.shares
        for node, share in enumerate(shares[: min(num_draft_tokens, TILE_ROWS)]):
            shares[node] = share + rate * ((node in path) - share)

    def looked_at(self, choice: int, num_choices: int, can_be_none: bool = True) -> int:
        """Return the index of the size to draft with: `choice`, the best, or sometimes a larger one to learn its gain.

        With `can_be_none`, index 0 means no draft; since such steps teach nothing, a trial draft replaces some of them.
        """
        if choice == 0 and can_be_none:
            return min(PROBE_CHOICE, num_choices - 1) if self._probes.is_due else 0
        return min(choice + (self.num_steps % EXPLORE_EVERY == EXPLORE_EVERY - 1), num_choices - 1)

    def state(self) -> np.ndarray:
        """Return the acceptance rates, then the step counts, `[TILE_ROWS + 3] float64`."""
        return np.array([*self.shares, self.num_steps, *self._probes.state()])

    def restore(self, state: np.ndarray) -> None:
        """Restore a result of `state`. Raises ValueError for an array of another shape, dtype or value range."""
        size = TILE_ROWS + 3
        if state.shape != (size,) or state.dtype != np.float64 or not np.isfinite(state).all():
            raise ValueError(f"node budget: found {state.dtype} {state.shape}, expected float64 ({size},)")
        if state[TILE_ROWS] < 0:
            raise ValueError(f"node budget: found {state[TILE_ROWS]} steps, expected none or more")
        self._probes.restore(state[TILE_ROWS + 1 :])
        self.shares, self.num_steps = state[:TILE_ROWS].tolist(), int(state[TILE_ROWS])

    def tokens(self, choices: tuple[int, ...]) -> list[float]:
        """Return the expected tokens of a step for trees of each size, the bonus token included.

        A node's acceptance rate is capped at the rates of the nodes before it.
        """
        accepted = list(accumulate(accumulate(self.shares, min), initial=1.0))
        return [accepted[nodes] for nodes in choices]


@dataclass(frozen=True)
class BudgetChoice:
    num_nodes: int
    rate: float


class NodeBudget:
    """Chooses the number of draft nodes with the most tokens per second."""

    def __init__(
        self, costs: StepCosts, prior: np.ndarray = PRIOR_ACCEPTANCE, choices: tuple[int, ...] = NODE_CHOICES
    ) -> None:
        self._costs = costs
        self._choices = choices
        self._acceptance = NodeAcceptance(prior)
        self._is_step_new = True  # no tree of this step was observed yet

    def state(self) -> np.ndarray:
        return self._acceptance.state()

    def restore(self, state: np.ndarray) -> None:
        self._acceptance.restore(state)

    def observe(self, num_draft_tokens: int, path: list[int]) -> None:
        """Learn from one verified tree; all trees since the last call of `best` belong to one step."""
        if self._is_step_new:
            self._acceptance.went_by(num_draft_tokens > 0)
        self._is_step_new = False
        self._acceptance.learn(num_draft_tokens, path)

    def best(
        self, length: int, num_sequences: int, proposing: float, node_seconds: float = 0.0, max_nodes: int = TILE_ROWS
    ) -> BudgetChoice:
        """Choose the number of nodes per sequence with the most tokens per second, at `length` cached tokens.

        A proposal takes `proposing` seconds, and `node_seconds` more for every node of every sequence.
        """
        costs = self._costs.as_routed()
        num_rows = max(TILE_ROWS, costs.rows_per_forward)
        room = max(1, min(max_nodes, num_rows // num_sequences - 1))
        choices = tuple(nodes for nodes in self._choices if nodes <= room) or (room,)
        rates = []
        for nodes, tokens in zip(choices, self._acceptance.tokens(choices), strict=True):
            drafting = proposing + nodes * num_sequences * node_seconds if nodes else 0.0
            rates.append(tokens / (costs.forward_seconds(nodes + 1, length, num_sequences) + drafting))
        best = self._acceptance.looked_at(rates.index(max(rates)), len(choices), choices[0] == 0)
        self._is_step_new = True
        return BudgetChoice(choices[best], num_sequences * rates[best])
