"""The number of draft nodes follows measured costs and the running acceptance."""

from __future__ import annotations

import numpy as np
import pytest

from tests.worker.drafters.drafter_parts import free_rows
from worker.drafters.budget import NodeBudget
from worker.target.step_costs import ROW_COUNTS, StepCosts, measure_step_costs
from worker.target.target import TargetModel
from worker.target.tiles import TILE_ROWS

FREE_ROWS = free_rows()
DEAR_ROWS = StepCosts((64, 8192), np.array([[1.0, 1.05, 1.1, 1.2, 1.5, 2.0], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]]))


def test_nodes_that_cost_nothing_are_all_taken() -> None:
    assert NodeBudget(FREE_ROWS).best(1000, num_sequences=1, overhead=0.0).num_nodes == TILE_ROWS - 1


def test_where_rows_are_dear_a_long_cache_gets_fewer_nodes() -> None:
    budget = NodeBudget(DEAR_ROWS)
    assert budget.best(64, 1, 0.0).num_nodes > budget.best(8192, 1, 0.0).num_nodes == 1


def test_sequences_share_a_tile() -> None:
    assert NodeBudget(FREE_ROWS).best(64, num_sequences=4, overhead=0.0).num_nodes == 7
    assert NodeBudget(FREE_ROWS).best(64, num_sequences=100, overhead=0.0).num_nodes == 1


def test_acceptance_that_falls_takes_nodes_away() -> None:
    budget = NodeBudget(DEAR_ROWS)
    before = budget.best(64, 1, 0.0).num_nodes
    for _ in range(24 * 20):
        budget.observe(31, [])
    assert budget.best(64, 1, 0.0).num_nodes < before


def test_costs_are_linear_between_and_beyond_what_was_measured() -> None:
    assert DEAR_ROWS.at(12, 64) == pytest.approx(1.35)
    assert DEAR_ROWS.at(32, 8192 + 8128) == pytest.approx(62.0)


def test_measured_costs_rise_with_rows_and_length(target: TargetModel) -> None:
    costs = measure_step_costs(target)
    assert costs.seconds.shape == (3, len(ROW_COUNTS))
    assert costs.at(32, 40_000) > costs.at(1, 40_000) > costs.at(1, 100) > 0


def test_a_short_generation_is_not_led_by_the_prior() -> None:
    budget = NodeBudget(StepCosts((64,), np.ones((1, 6))))
    for _ in range(20):
        budget.observe(8, [])
    assert budget.state()[0] < 0.25  # the prior says 0.6; at the final rate alone it would still be 0.4
