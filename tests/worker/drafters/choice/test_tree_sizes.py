"""The sizes of trees follow measured costs and the running acceptance."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.choice.choosing_drafter import with_trees
from swiftbatch.worker.drafters.choice.tree_sizes import EXPLORE_EVERY, NODE_CHOICES, NodeAcceptance, best_shares
from swiftbatch.worker.drafters.choice.ways import TreeWay
from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest, TreeDrafter
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward import step_costs
from swiftbatch.worker.forward.step_costs import ROW_COUNTS, StepCosts, measure_step_costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.kernel_sizes import TILE_ROWS
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.draft_tree import DraftTree, Verification
from swiftbatch.worker.sampling.sequence import Sequence
from tests.simulated_clock import SimulatedClock
from tests.worker.drafters.drafter_parts import free_rows, run_to_ends

FREE_ROWS = free_rows()
DEAR_ROWS = StepCosts((64, 8192), np.array([[1.0, 1.05, 1.1, 1.2, 1.5, 2.0], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]]))


def sizes_of(length: int, num_sequences: int, costs: StepCosts) -> list[int]:
    """Return the nodes of sequences as long, before any was verified."""
    tokens = np.array([NodeAcceptance().tokens()] * num_sequences)
    chosen, _ = best_shares(costs, tokens, np.array([length] * num_sequences), beside=0.0)
    return [NODE_CHOICES[choice] for choice in chosen]


def test_nodes_that_cost_nothing_are_all_taken() -> None:
    assert sizes_of(1000, 1, FREE_ROWS) == [TILE_ROWS - 1]


def test_where_rows_are_dear_a_long_cache_gets_fewer_nodes() -> None:
    assert sizes_of(64, 1, DEAR_ROWS) > sizes_of(8192, 1, DEAR_ROWS)


def test_costs_are_linear_between_and_beyond_what_was_measured() -> None:
    assert DEAR_ROWS.at(12, 64) == pytest.approx(1.35)
    assert DEAR_ROWS.at(32, 8192 + 8128) == pytest.approx(62.0)


def test_measured_costs_rise_with_rows_and_length(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a forward takes a millisecond here for every thousand positions before it."""
    clock = SimulatedClock()
    clock.rule(monkeypatch)
    verify = clock.taking(lambda groups, *_: sum(len(g) * g.first_entry for g in groups) / 1e6, target.verify)
    monkeypatch.setattr(target, "verify", verify)
    costs = measure_step_costs(target)
    assert costs.seconds.shape == (3, len(ROW_COUNTS))
    assert costs.at(32, 40_000) == pytest.approx(32 * 0.04)
    assert costs.at(1, 40_000) == pytest.approx(0.04)
    assert costs.at(1, 100) == pytest.approx(0.0001)


def test_what_disturbs_one_of_the_times_makes_no_row_dear_or_free(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first forward in a long cache took twenty times as long as the next one: all drafts seemed to be free."""
    calls = itertools.count()

    def seconds_of(_: TargetModel, forward: functools.partial[object]) -> float:
        [rows] = forward.args[0]
        return 0.4 if next(calls) % 7 == 0 else 0.01 * len(rows)

    monkeypatch.setattr(step_costs, "PROBE_REPEATS", 3)
    monkeypatch.setattr(step_costs, "seconds_of", seconds_of)
    costs = measure_step_costs(target)
    assert costs.seconds == pytest.approx(np.array([[0.01 * rows for rows in ROW_COUNTS]] * len(costs.lengths)))


def test_a_short_generation_is_not_led_by_the_prior() -> None:
    acceptance = NodeAcceptance()
    for _ in range(20):
        acceptance.observe(8, [])
    assert acceptance.state()[0] < 0.25  # the prior says 0.6; at the final rate alone it would still be 0.4


class Chains(TreeDrafter):
    """Chains as long as they may be."""

    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        return DraftTree.chain([0] * min(max_nodes, max_depth))


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_trees_are_as_large_as_pays_for_sequences_that_share_a_forward(num_sequences: int) -> None:
    sequence = Sequence("a", [1] * 8193, SamplingParams(max_tokens=9), 10)
    lengths = []
    for beside in (0.0, 100.0):  # what a step takes beside its forward makes larger trees pay
        way, requests = TreeWay(Chains(), DEAR_ROWS), [DraftRequest(sequence, 127, 63)] * num_sequences
        way.promise(requests, beside)
        trees = way.propose(requests)
        assert len(trees) == num_sequences
        lengths.append(len(trees[0]))
    assert lengths[0] < lengths[1]
    assert len(TreeWay(Chains(), FREE_ROWS).propose([DraftRequest(sequence, 2, 63)])[0]) == 2
    assert len(Chains().propose([DraftRequest(sequence, 127, 63)])[0]) == 63


def test_no_sequences_get_no_trees() -> None:
    assert with_trees(Chains(), free_rows).propose([]) == Chains().propose([]) == []


def shares(acceptance: list[float], lengths: list[int], costs: StepCosts = DEAR_ROWS) -> list[int]:
    """Nodes of sequences whose every node is accepted in such a share of steps in which its parent was."""
    tokens = [[1.0 + sum(share**i for i in range(1, nodes + 1)) for nodes in NODE_CHOICES] for share in acceptance]
    chosen, _ = best_shares(costs, np.array(tokens), np.array(lengths), beside=0.0)
    return [NODE_CHOICES[choice] for choice in chosen]


def test_rows_go_where_the_text_repeats_itself() -> None:
    repeating, *others = shares([0.98, 0.05, 0.05, 0.05], [64] * 4)
    assert repeating > 5
    assert others == [0, 0, 0]


def test_rows_go_where_they_are_cheap() -> None:
    short, long = shares([0.7, 0.7], [64, 8192])
    assert short > long


def test_shares_promise_no_less_than_any_others() -> None:
    """All that three sequences can have is tried: the search looks at few of these choices."""
    lengths, acceptance = [64, 2000, 8192], [0.9, 0.8, 0.6]
    tokens = np.array([[1.0 + sum(s**i for i in range(1, n + 1)) for n in NODE_CHOICES] for s in acceptance])
    rows, own = np.array(NODE_CHOICES) + 1, DEAR_ROWS.own_seconds(np.array(NODE_CHOICES) + 1, np.array(lengths))

    def rate(chosen: tuple[int, ...]) -> float:
        picked = np.arange(3), np.array(chosen)
        seconds = DEAR_ROWS.shared_seconds(int(rows[list(chosen)].sum())) + own[picked].sum()
        return float(tokens[picked].sum() / seconds)

    best = max(map(rate, itertools.product(range(len(NODE_CHOICES)), repeat=3)))
    found, promised = best_shares(DEAR_ROWS, tokens, np.array(lengths), 0.0)
    assert rate(tuple(found)) == pytest.approx(promised)
    assert promised > 0.97 * best


def test_seconds_of_many_sequences_at_once_are_those_of_each() -> None:
    rows, lengths = np.array([1, 2, 12, 32]), np.array([0, 64, 5000, 8192, 20_000])
    own = DEAR_ROWS.own_seconds(rows, lengths)
    for i, length in enumerate(lengths.tolist()):
        for j, number in enumerate(rows.tolist()):
            alone = DEAR_ROWS.shared_seconds(number) + own[i, j]
            assert alone == pytest.approx(DEAR_ROWS.at(number, length))
            assert alone == pytest.approx(DEAR_ROWS.forward_seconds(number, length, 1))


def test_small_trees_tell_of_large_ones() -> None:
    """Looks are small: where none of their nodes comes, no more of those behind them would."""
    acceptance = NodeAcceptance()
    before = acceptance.tokens()
    for _ in range(100):
        acceptance.learn(3, [])
    assert acceptance.tokens()[-1] < 1.5 < before[-1]
    for _ in range(100):
        acceptance.learn(3, [0, 1, 2])
    assert acceptance.tokens()[-1] > 0.9 * (before[-1] + 1)


def test_a_drafter_learns_what_pays() -> None:
    sequence = Sequence("a", [1] * 9, SamplingParams(max_tokens=9), 10)
    way = TreeWay(Chains(), DEAR_ROWS)
    [before] = way.propose([DraftRequest(sequence, 127, 63)])
    for _ in range(24 * 20):
        verification = Verification(DraftTree.chain([0] * 31), [], [1], np.zeros(32, dtype=int), None, None)
        way.update_all([(sequence, verification)])
    [after] = way.propose([DraftRequest(sequence, 127, 63)])
    assert len(after) < len(before)


class Recorder(Drafter):
    """Takes its time when it learns, and proposes nothing."""

    def __init__(self, clock: SimulatedClock) -> None:
        self.overheads: list[float] = []
        self._clock = clock

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        self.overheads += [request.overhead for request in requests]
        return [DraftTree() for _ in requests]

    def update(self, sequence: Sequence, verification: Verification) -> None:
        self._clock.now += 0.25


def test_drafters_are_told_what_a_step_takes_beside_its_forward(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimulatedClock()
    clock.rule(monkeypatch)
    target, drafter = TargetModel.load(locate_model(str(tiny_model)), "float32", "cpu"), Recorder(clock)
    monkeypatch.setattr(target, "verify", clock.taking(lambda groups, *_: 1.0, target.verify))
    sequence = Sequence("a", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), target.vocab_size)
    run_to_ends(Engine(target, drafter), sequence)
    assert drafter.overheads[0] == 0.0
    assert drafter.overheads[1:] == pytest.approx([0.25] * len(drafter.overheads[1:]))


@pytest.mark.parametrize(("place", "number"), [(TILE_ROWS, -9.0), (TILE_ROWS + 2, 1e18)], ids=["steps", "interval"])
def test_a_state_that_would_end_a_run_or_all_looks_is_refused(place: int, number: float) -> None:
    acceptance = NodeAcceptance()
    before = acceptance.state()
    damaged = before.copy()
    damaged[place] = number
    with pytest.raises(ValueError, match="node budget"):
        acceptance.restore(damaged)
    assert (acceptance.state() == before).all()


def test_where_nothing_is_drafted_looks_become_rare() -> None:
    acceptance, looked = NodeAcceptance(), []
    for _ in range(1000):
        looked.append(acceptance.looked_at(0) > 0)
        acceptance.observe(3 * looked[-1], [])
    assert sum(looked[:100]) == 3
    assert 0 < sum(looked[500:]) <= 5


def test_trees_of_one_node_are_made_larger_now_and_then() -> None:
    acceptance, sizes = NodeAcceptance(), []
    for _ in range(2 * EXPLORE_EVERY):
        sizes.append(acceptance.looked_at(1))
        acceptance.observe(NODE_CHOICES[sizes[-1]], [])
    assert sizes.count(2) == 2
    assert sizes.count(1) == len(sizes) - 2
