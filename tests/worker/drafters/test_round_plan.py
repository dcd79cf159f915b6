"""The rounds and nodes of a draft."""

from __future__ import annotations

import numpy as np
import pytest

from swiftbatch.worker.drafters.self_speculation.draft_chain import ChainTree, Round
from swiftbatch.worker.drafters.self_speculation.round_planner import PRIOR_CHAIN_ACCEPTANCE, MeasuredPlanner, Planner
from swiftbatch.worker.drafters.tokenswift.tokenswift import whole_trees
from swiftbatch.worker.drafters.tree_budget import EXPLORE_EVERY, NODE_CHOICES, NodeBudget
from swiftbatch.worker.forward.step_costs import ROW_COUNTS, StepCosts
from swiftbatch.worker.sampling.draft_tree import DraftTree

BUDGET = 2048
LENGTHS = (64, 8192, 49_152)


def costs(row_seconds: float = 0.00005) -> StepCosts:
    """4 ms a forward, 0.4 ms per 1,000 cached positions, and `row_seconds` per row."""
    seconds = [[0.004 + n / 1000 * (0.0004 + row_seconds * rows) for rows in ROW_COUNTS] for n in LENGTHS]
    return StepCosts(LENGTHS, np.array(seconds))


def learned(acceptance: float, tree_acceptance: float = 0.4, row_seconds: float = 0.00005) -> MeasuredPlanner:
    """The planner has seen chains with `acceptance` per token, and trees by their first node."""
    planner = MeasuredPlanner(costs(row_seconds), BUDGET)
    random = np.random.default_rng(0)
    for _ in range(400):
        num_accepted = int(np.argmin([*(random.random(31) < acceptance), False]))
        path = [0] if random.random() < tree_acceptance else []
        chain = ChainTree(DraftTree.chain([0] * 31), 31, [Round(5, path, 0.005)])
        planner.observe(chain, list(range(num_accepted)))
    return planner


def test_trees_go_straight_to_a_short_cache_and_chains_to_a_long_one() -> None:
    planner = learned(acceptance=0.95)
    assert planner.plan(500, 1, 63).num_rounds == 0
    assert learned(acceptance=1.0, tree_acceptance=0.01).plan(BUDGET, 1, 63).num_rounds == 0  # a round sees everything
    assert planner.plan(100_001, 1, 63).num_rounds > 0


def test_chains_grow_with_the_length_and_with_the_acceptance() -> None:
    def chain_length(acceptance: float, length: int) -> int:
        return learned(acceptance).plan(length, 1, 63).chain_length

    assert chain_length(0.95, 20_001) < chain_length(0.95, 200_001)
    assert chain_length(0.7, 100_001) < chain_length(0.97, 100_001)


def test_dear_rows_make_short_drafts() -> None:
    cheap, dear = (learned(0.95, row_seconds=seconds).plan(100_001, 1, 63) for seconds in (1e-6, 2e-4))
    assert dear.num_nodes < cheap.num_nodes


def test_several_sequences_share_the_rows_of_a_forward() -> None:
    planner = learned(0.97)
    assert planner.plan(100_001, 8, 63).num_nodes <= 3 < planner.plan(100_001, 1, 63).num_nodes


def test_a_draft_is_no_deeper_than_allowed() -> None:
    assert learned(0.97).plan(100_001, 1, 2).chain_length <= 2


def test_what_was_learned_goes_into_another_planner() -> None:
    planner, fresh = learned(0.95), MeasuredPlanner(costs(), BUDGET)
    fresh.restore(planner.state())
    for length in (500, 20_001, 100_001):
        assert fresh.plan(length, 1, 63) == planner.plan(length, 1, 63)


def test_nodes_of_a_slower_machine_do_not_make_drafts_smaller_here() -> None:
    slow, here = MeasuredPlanner(costs(), BUDGET, node_seconds=1.0), MeasuredPlanner(costs(), BUDGET)
    before = here.plan(500, 1, 63)
    here.restore(slow.state())
    assert here.plan(500, 1, 63) == before


@pytest.mark.parametrize("rounds", [1, 3])
def test_the_papers_plan_is_always_the_same(rounds: int) -> None:
    planner = Planner(whole_trees(rounds))
    assert planner.plan(100, 1, 63) == planner.plan(100_000, 4, 5)
    assert planner.plan(100, 1, 63).num_rounds == rounds
    assert planner.state() == {}


@pytest.mark.parametrize("num_sequences", [1, 2, 16])
def test_where_nothing_pays_looks_become_rare_however_many_sequences_share_a_step(num_sequences: int) -> None:
    planner = MeasuredPlanner(costs(row_seconds=1.0), BUDGET)
    drafted = []
    for _ in range(1000):
        plans = [planner.plan(200, num_sequences, 63) for _ in range(num_sequences)]
        drafted.append(any(plan.num_nodes for plan in plans))
        for plan in plans:
            planner.observe(ChainTree(DraftTree.chain([1] * plan.num_nodes)), [])
    assert 0 < sum(drafted[500:]) <= 5


def test_chains_of_one_token_are_made_longer_now_and_then() -> None:
    budget = NodeBudget(costs(row_seconds=0.01), PRIOR_CHAIN_ACCEPTANCE, NODE_CHOICES[1:])
    sizes = []
    for _ in range(2 * EXPLORE_EVERY):
        sizes.append(budget.best(10_000, 1, 0.0).num_nodes)
        budget.observe(sizes[-1], [])
    assert sizes.count(1) > EXPLORE_EVERY
    assert max(sizes[-EXPLORE_EVERY:]) > 1
