"""Plans how many rounds with a partial cache, and how many nodes, come before one full verification."""

from __future__ import annotations

import numpy as np

from swiftbatch.worker.caches.full_cache import MAX_TREE_NODES
from swiftbatch.worker.drafters.tree_budget import EXPLORE_EVERY, LEARNING_RATE, NODE_CHOICES, BudgetChoice, NodeBudget
from swiftbatch.worker.drafters.two_level.chain import ChainTree, Round, RoundPlan
from swiftbatch.worker.kernels.kernel_sizes import TILE_ROWS
from swiftbatch.worker.target.step_costs import Costs, StepCosts

PRIOR_CHAIN_ACCEPTANCE = 0.9 ** np.arange(1, TILE_ROWS + 1)  # of token i, before anything was seen
PRIOR_ROUND_TOKENS = 1.5
PRIOR_PROPOSE_SECONDS = 0.001
NO_ROUNDS = RoundPlan(0, 0, 0, 0)
WORTH_A_LOOK = 0.7  # of the better way's rate: below it the other way is not tried again


class Planner:
    """Gives all sequences the plan that it holds; others work one out, and hear what became of what was proposed."""

    max_nodes = MAX_TREE_NODES

    def __init__(self, plan: RoundPlan = NO_ROUNDS) -> None:
        self._plan = plan

    def plan(self, length: int, num_sequences: int, max_depth: int) -> RoundPlan:
        """Plan for a sequence of `length` cached positions that shares its forwards with others."""
        return self._plan

    def observe(self, proposed: ChainTree, path: list[int]) -> None:
        """Learn from a proposal that was verified in full, and of which the nodes of `path` were accepted."""

    def state(self) -> dict[str, np.ndarray]:
        """Return what it has learned."""
        return {}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` returned. Unfit arrays raise ValueError and change nothing."""


class MeasuredPlanner(Planner):
    """Plans as many rounds and nodes as give most tokens per second, by measured costs and the running acceptance."""

    max_nodes = TILE_ROWS - 1

    def __init__(self, costs: StepCosts, budget: int, node_seconds: float = 0.0) -> None:
        """Plan for `budget` entries in a partial cache; a node takes `node_seconds` beside what is measured."""
        super().__init__()
        self._budget = budget
        self._node_seconds = node_seconds
        self._trees = NodeBudget(costs)
        self._chains = NodeBudget(costs, PRIOR_CHAIN_ACCEPTANCE, NODE_CHOICES[1:])
        self._round_tokens = PRIOR_ROUND_TOKENS
        self._round_seconds = costs.at(4, budget)
        self._propose_seconds = PRIOR_PROPOSE_SECONDS

    def plan(self, length: int, num_sequences: int, max_depth: int) -> RoundPlan:
        tree = self.tree(length, num_sequences)
        if length <= self._budget:  # a partial cache that holds everything checks no sooner than the target itself
            return RoundPlan(0, 0, 0, tree.num_nodes)
        token_seconds = self._round_seconds / self._round_tokens
        chain = self._chains.best(length, num_sequences, 0.0, token_seconds, max_depth)
        is_tree = tree.rate >= chain.rate
        is_close = min(tree.rate, chain.rate) > WORTH_A_LOOK * max(tree.rate, chain.rate)
        if is_tree != (is_close and length % EXPLORE_EVERY == 0):
            return RoundPlan(0, 0, 0, tree.num_nodes)
        checked = self.tree(min(length, self._budget), num_sequences)
        return RoundPlan(TILE_ROWS, checked.num_nodes, chain.num_nodes, chain.num_nodes)

    def tree(self, length: int, num_sequences: int, max_nodes: int = TILE_ROWS) -> BudgetChoice:
        """The proposed tree that pays most where a cache of `length` positions verifies it."""
        proposing = num_sequences * self._propose_seconds
        return self._trees.best(length, num_sequences, proposing, self._node_seconds, max_nodes)

    def observe(self, proposed: ChainTree, path: list[int]) -> None:
        for round_ in proposed.rounds:
            self._observe_round(round_)
        if proposed.chain_length:
            self._chains.observe(proposed.chain_length, [node for node in path if node < proposed.chain_length])
            return
        num_nodes = len(proposed.tree)
        self._trees.observe(num_nodes, path)
        if num_nodes == 0:
            return
        beside_nodes = max(0.0, proposed.propose_seconds - num_nodes * self._node_seconds)
        self._propose_seconds += LEARNING_RATE * (beside_nodes - self._propose_seconds)

    def _observe_round(self, round_: Round) -> None:
        """Learn from a round: its tree was checked as well, by the target with a partial cache."""
        self._trees.observe(round_.num_nodes, round_.path)
        self._round_tokens += LEARNING_RATE * (len(round_.path) + 1 - self._round_tokens)
        self._round_seconds += LEARNING_RATE * (round_.seconds - self._round_seconds)

    def state(self) -> dict[str, np.ndarray]:
        means = np.array([self._round_tokens, self._round_seconds, self._propose_seconds, self._node_seconds])
        return {"plan_trees": self._trees.state(), "plan_chains": self._chains.state(), "plan_means": means}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        missing = self.state().keys() - state.keys()
        if missing:
            raise ValueError(f"draft plan: the state lacks {', '.join(sorted(missing))}")
        means = state["plan_means"]
        if means.shape != (4,) or not (np.isfinite(means) & (means >= 0)).all() or means[0] < 1:
            raise ValueError(f"draft plan: found means {means.tolist()}, expected tokens of a round and three times")
        trees = self._trees.state()
        self._trees.restore(state["plan_trees"])
        try:
            self._chains.restore(state["plan_chains"])
        except ValueError:
            self._trees.restore(trees)
            raise
        # the seconds of a node were measured on this machine and are not learned again
        self._round_tokens, self._round_seconds, self._propose_seconds, _ = means.tolist()


def planner_of(plan: RoundPlan | None, costs: Costs, budget: int, node_seconds: float = 0.0) -> Planner:
    """Make a planner of always one plan, or, with None, a `MeasuredPlanner`."""
    return MeasuredPlanner(costs(), budget, node_seconds) if plan is None else Planner(plan)
