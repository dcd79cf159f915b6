"""Forwards with 64 fixed rows cost nothing more up to there, then as much again."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.choice.rounds import RoundsPlanner
from swiftbatch.worker.drafters.choice.tree_sizes import NODE_CHOICES, NUM_ROWS, best_shares
from swiftbatch.worker.drafters.choice.ways import TreeWay
from swiftbatch.worker.drafters.drafter_interface import DraftRequest
from swiftbatch.worker.drafters.griffin.griffin import PricePlanner
from swiftbatch.worker.forward import step_costs
from swiftbatch.worker.forward.expert_counts import ExpertCounts, ExpertSpread
from swiftbatch.worker.forward.step_costs import ROW_COUNTS, StepCosts, measure_step_costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.drafters.choice.test_tree_sizes import Chains, sizes_of
from tests.worker.forward.cuda.cuda_parts import cuda_target

FORWARD, ROW_AND_POSITION = 0.01, 1e-7


class ClockOfAGPU:
    def __init__(self) -> None:
        self.timed: list[list[int]] = []  # the tokens of each forward

    def seconds(self, call: Callable[[], object]) -> float:
        assert isinstance(call, functools.partial)
        [rows] = call.args[0]
        self.timed.append(rows.token_ids)
        num_groups = -(-len(rows) // 16)  # rows that share one read of the cache
        return FORWARD + 16 * num_groups * rows.first_entry * ROW_AND_POSITION


@pytest.fixture(scope="module")
def clock() -> ClockOfAGPU:
    return ClockOfAGPU()


@pytest.fixture(scope="module")
def costs(tiny_model: Path, clock: ClockOfAGPU) -> StepCosts:
    target = cuda_target(locate_model(str(tiny_model)), torch.float32, num_slots=1, longest_job=2000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_costs, "Clock", lambda device: clock)
        return measure_step_costs(target)


def test_rows_that_are_timed_have_tokens_of_their_own_so_that_each_meets_other_experts(
    costs: StepCosts, clock: ClockOfAGPU
) -> None:
    assert costs.lengths
    assert {len(token_ids) for token_ids in clock.timed} == set(ROW_COUNTS)
    assert all(len(set(token_ids)) == len(token_ids) for token_ids in clock.timed)


def test_they_are_what_the_device_s_clock_says_up_to_the_longest_job(costs: StepCosts) -> None:
    assert costs.lengths == (64, 1984)
    assert costs.rows_per_forward == 64
    assert costs.at(16, 1984) == pytest.approx(FORWARD + 16 * 1984 * ROW_AND_POSITION)
    assert costs.at(32, 1984) == pytest.approx(FORWARD + 32 * 1984 * ROW_AND_POSITION)


def test_a_row_beside_others_is_free_up_to_64_of_all_sequences(costs: StepCosts) -> None:
    assert costs.shared_seconds(1) == costs.shared_seconds(64) == pytest.approx(FORWARD)
    assert costs.shared_seconds(65) == costs.shared_seconds(128) == pytest.approx(2 * FORWARD)
    assert costs.forward_seconds(16, 0, 4) == pytest.approx(FORWARD)
    assert costs.forward_seconds(17, 0, 4) == pytest.approx(2 * FORWARD)


@pytest.mark.parametrize(("num_sequences", "num_nodes"), [(8, 31), (64, 3), (128, 1), (200, 0)])
def test_sequences_share_as_many_rows_as_the_run_s_forwards_have(
    costs: StepCosts, num_sequences: int, num_nodes: int
) -> None:
    wide = replace(costs, rows_per_forward=256)
    assert wide.shared_seconds(1) == wide.shared_seconds(256) == pytest.approx(FORWARD)
    assert wide.shared_seconds(257) == pytest.approx(2 * FORWARD)
    assert set(sizes_of(0, num_sequences, wide)) == {num_nodes}


def test_wider_forwards_cost_what_was_timed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = cuda_target(locate_model(str(tiny_model)), torch.float32, num_slots=1, longest_job=300, num_rows=256)

    class SteppedClock:
        def seconds(self, call: functools.partial[object]) -> float:
            num_rows = sum(len(rows) for rows in call.args[0])
            return FORWARD * next(number for number in (64, 128, 256) if num_rows <= number) / 64

    monkeypatch.setattr(step_costs, "Clock", lambda device: SteppedClock())
    costs = measure_step_costs(target)
    shared = [costs.shared_seconds(number) / FORWARD for number in (1, 64, 65, 128, 129, 256, 257)]
    assert shared == pytest.approx([1, 1, 2, 2, 4, 4, 5])
    assert {price * number for number in (64, 128, 256) for price in costs.row_prices(9)} >= {FORWARD}


def test_a_whole_forward_of_rows_with_experts_is_timed_and_not_guessed(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 rows meet almost all experts, so 128 rows do not take four times as long."""
    target = cuda_target(locate_model(str(tiny_model)), torch.float32, num_slots=1, longest_job=200, num_rows=128)
    monkeypatch.setattr(target.forwards, "has_experts", True)

    class CountingClock:
        def seconds(self, call: functools.partial[object]) -> float:
            num_rows = sum(len(rows) for rows in call.args[0])
            return FORWARD + 1e-4 * min(num_rows, 40)

    monkeypatch.setattr(step_costs, "Clock", lambda device: CountingClock())
    costs = measure_step_costs(target)
    assert costs.full_seconds == costs.shared_seconds(128) == pytest.approx(FORWARD + 40e-4)
    assert costs.shared_seconds(32) == pytest.approx(FORWARD + 32e-4)
    assert costs.row_prices(100)[0] == pytest.approx(8e-4 / 96)


def test_attention_to_each_sequence_s_own_cache_comes_on_top(costs: StepCosts) -> None:
    own = costs.own_seconds(np.array([1, 16, 32]), np.array([0, 1984]))
    assert own[0] == pytest.approx(0, abs=1e-9)
    assert own[1] == pytest.approx(np.array([16, 16, 32]) * 1984 * ROW_AND_POSITION)


@pytest.mark.parametrize(("num_sequences", "num_nodes"), [(1, 31), (2, 31), (4, 15), (5, 11), (32, 1), (40, 0)])
def test_sequences_share_64_rows(costs: StepCosts, num_sequences: int, num_nodes: int) -> None:
    assert set(sizes_of(0, num_sequences, costs)) == {num_nodes}


ACCEPTANCE = [(0.98, 0.05, 0.05, 0.05), (0.9, 0.8, 0.6, 0.3), (0.7, 0.7, 0.7, 0.7), (0.95, 0.95, 0.95, 0.9)]


@pytest.mark.parametrize("acceptance", ACCEPTANCE)
@pytest.mark.parametrize("lengths", [(0, 0, 0, 0), (1000, 20_000, 50_000, 100_000)])
def test_shares_promise_no_less_than_any_others(
    costs: StepCosts, acceptance: tuple[float, ...], lengths: tuple[int, ...]
) -> None:
    """Compares with all choices of four sequences."""
    tokens = np.array([[1.0 + sum(s**i for i in range(1, n + 1)) for n in NODE_CHOICES] for s in acceptance])
    own = costs.own_seconds(NUM_ROWS, np.array(lengths))
    all_chosen = np.array(list(itertools.product(range(len(NODE_CHOICES)), repeat=4)))
    every = np.arange(4)

    def rates(chosen: np.ndarray) -> np.ndarray:
        shared = np.array([0.0, *(costs.shared_seconds(rows) for rows in range(1, 129))])
        seconds = shared[NUM_ROWS[chosen].sum(axis=1)] + own[every, chosen].sum(axis=1)
        result: np.ndarray = tokens[every, chosen].sum(axis=1) / seconds
        return result

    found, _ = best_shares(costs, tokens, np.array(lengths), 0.0)
    assert rates(found[None])[0] > 0.97 * rates(all_chosen).max()


def test_a_replay_is_run_in_whole_forwards(costs: StepCosts) -> None:
    assert costs.replay_seconds(0, 640) == pytest.approx(10 * FORWARD + 640 * 320 * ROW_AND_POSITION)


def test_a_clock_that_sees_nothing_leaves_every_choice_open() -> None:
    nothing = StepCosts((64, 8192), np.zeros((2, len(ROW_COUNTS))))
    shares, _ = best_shares(nothing, np.ones((2, len(NODE_CHOICES))), np.array([64, 64]), 0.0)
    assert len(shares) == 2


NUM_EXPERTS, NUM_CHOSEN, NUM_LAYERS = 128, 8, 4
BASE, PER_EXPERT = 0.01, 0.001  # seconds of a step without experts, and per expert over all layers


def distinct(num_rows: int, share: float) -> float:
    """Return the experts met by evenly choosing rows."""
    apart = NUM_EXPERTS * (1 - (1 - NUM_CHOSEN / NUM_EXPERTS) ** num_rows)
    return NUM_CHOSEN + share * (apart - NUM_CHOSEN)


def step_seconds(num_rows: int, share: float) -> float:
    return BASE + PER_EXPERT * distinct(num_rows, share)


def routed_costs(counts: ExpertCounts, probed: float = 1.0) -> StepCosts:
    """`probed` is the share of experts that the probes' rows meet."""
    seconds = np.array([[step_seconds(rows, probed) for rows in ROW_COUNTS]] * 2)
    alike, apart = ([NUM_LAYERS * distinct(rows, share) for rows in ROW_COUNTS] for share in (0.0, probed))
    spread = ExpertSpread(ROW_COUNTS, seconds[0] - step_seconds(1, 0.0), np.array(alike), np.array(apart), counts)
    return StepCosts((64, 8192), seconds, has_experts=True, spread=spread)


def true_rate(num_nodes: int, accepted: float, share: float) -> float:
    tokens = 1.0 + sum(accepted ** (1 + each) for each in range(num_nodes))
    return tokens / step_seconds(num_nodes + 1, share)


def settled_choice(costs: StepCosts, counts: ExpertCounts, accepted: float, share: float) -> int:
    """Return the nodes drafted by one sequence after real steps."""
    tokens = np.array([[1.0 + sum(accepted ** (1 + each) for each in range(nodes)) for nodes in NODE_CHOICES]])
    choice = 0
    for _ in range(12):
        for nodes in (0, NODE_CHOICES[choice], NODE_CHOICES[min(choice + 1, len(NODE_CHOICES) - 1)]):
            counts.observe(nodes + 1, round(NUM_LAYERS * distinct(nodes + 1, share)))
        choice = int(best_shares(costs.as_routed(), tokens, np.array([64]), 0.0)[0][0])
    return NODE_CHOICES[choice]


@pytest.mark.parametrize("probed", [1.0, 0.5])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("accepted", [0.3, 0.6, 0.8, 0.95])
def test_drafts_are_never_chosen_where_the_experts_of_real_steps_make_them_lose(
    accepted: float, share: float, probed: float
) -> None:
    """Probes that meet half as many experts make drafts look too good."""
    counts = ExpertCounts()
    chosen = settled_choice(routed_costs(counts, probed), counts, accepted, share)
    plain, best = (max(true_rate(nodes, accepted, share) for nodes in all_nodes) for all_nodes in ((0,), NODE_CHOICES))
    assert true_rate(chosen, accepted, share) >= 0.97 * plain
    assert true_rate(chosen, accepted, share) >= 0.9 * best


def test_before_real_steps_tell_rows_count_as_many_experts_as_rows_may_meet() -> None:
    counts = ExpertCounts()
    costs = routed_costs(counts)
    assert np.array_equal(costs.as_routed().seconds, costs.seconds)
    counts.observe(8, round(NUM_LAYERS * distinct(8, 0.25)))
    found = costs.as_routed()
    for rows in (1, 4, 32):
        assert found.at(rows, 64) == pytest.approx(step_seconds(rows, 0.25), rel=0.01)
    counts.forget()
    assert np.array_equal(costs.as_routed().seconds, costs.seconds)


@pytest.mark.parametrize("probed", [1.0, 0.25])
@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize("attention", [0.01, 0.03, 0.1])
def test_rounds_promise_what_the_experts_of_real_steps_let_them_bring(
    attention: float, share: float, probed: float
) -> None:
    """Rounds of one row after a long text must not look better or worse by what probes met."""

    def behind_a_long_text(costs: StepCosts) -> StepCosts:
        by_rows = attention * (1 + 0.05 * np.array(ROW_COUNTS))
        return replace(costs, lengths=(64, 40_064), seconds=costs.seconds + np.array([0.0, 1.0])[:, None] * by_rows)

    counts = ExpertCounts()
    for rows in ROW_COUNTS:
        counts.observe(rows, round(NUM_LAYERS * distinct(rows, share)))
    planned, true = (
        RoundsPlanner(behind_a_long_text(costs)).best(np.array([40_064]), np.ones((1, len(NODE_CHOICES))), 0.0)
        for costs in (routed_costs(counts, probed), replace(routed_costs(counts, share), spread=None))
    )
    assert planned.chain_length == true.chain_length
    assert planned.rate == pytest.approx(true.rate, rel=0.01)


def test_trees_of_trained_parts_are_priced_by_the_experts_that_real_steps_met() -> None:
    counts = ExpertCounts()
    costs = routed_costs(counts)
    prices = PricePlanner(costs, level_seconds=0.001)
    row, few = prices.prices(64, 1).row, sizes_of(64, 1, costs.as_routed())
    for rows in ROW_COUNTS:
        counts.observe(rows, NUM_LAYERS * NUM_CHOSEN)
    assert prices.prices(64, 1).row < 0.1 * row
    assert sizes_of(64, 1, costs.as_routed()) > few


def test_what_real_steps_met_is_looked_at_again_every_few_steps() -> None:
    counts = ExpertCounts()
    costs = routed_costs(counts)
    for _ in range(100):
        counts.observe(4, NUM_LAYERS * NUM_CHOSEN)
        assert costs.as_routed() is costs.as_routed()
    assert costs.as_routed().at(4, 64) == pytest.approx(step_seconds(4, 0.0), rel=0.01)


def test_plans_of_drafts_follow_what_real_steps_met() -> None:
    sequence, sizes = Sequence("s", [1, 2], SamplingParams(max_tokens=9), 10), []
    for share in (1.0, 0.0):
        counts = ExpertCounts()
        counts.observe(4, round(NUM_LAYERS * distinct(4, share)))
        costs = routed_costs(counts)
        [tree] = TreeWay(Chains(), costs).propose([DraftRequest(sequence, 127, 63)])
        sizes.append(len(tree))
    assert sizes[0] < sizes[1] == NODE_CHOICES[-1], "rows that share a row's experts cost nothing here"


def test_on_a_gpu_no_row_is_free_that_meets_experts_of_its_own() -> None:
    seconds = np.array([[step_seconds(rows, 1.0) for rows in ROW_COUNTS]] * 2)
    costs = StepCosts((64, 8192), seconds, 64, has_experts=True)
    assert costs.shared_seconds(1) == pytest.approx(step_seconds(1, 1.0))
    assert costs.shared_seconds(32) == pytest.approx(step_seconds(32, 1.0))
    assert costs.shared_seconds(66) == pytest.approx(costs.shared_seconds(64) + costs.shared_seconds(2))
    tokens = np.array([[1.0 + sum(0.3 ** (1 + each) for each in range(nodes)) for nodes in NODE_CHOICES]])
    assert not best_shares(costs, tokens, np.array([64]), 0.0)[0].any(), "a second row takes nearly as long again"
    free = StepCosts((64, 8192), np.full((2, len(ROW_COUNTS)), step_seconds(1, 1.0)), 64)
    assert best_shares(free, tokens, np.array([64]), 0.0)[0].any()


def test_where_caches_have_little_memory_costs_are_probed_in_that_of_one_layer(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetModel.load(locate_model(str(tiny_model)), "float32", "cpu")
    lengths = step_costs._probe_cache(target)[1]
    monkeypatch.setattr(target, "num_free_positions", lambda: 2 * lengths[-1] - 1)
    monkeypatch.setattr(target, "new_cache", lambda *_: pytest.fail("a cache of all layers was asked for"))
    assert step_costs._probe_cache(target)[1] == lengths
