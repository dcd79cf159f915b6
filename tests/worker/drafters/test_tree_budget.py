"""The number of draft nodes follows measured costs and the running acceptance."""

from __future__ import annotations

import functools
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftbatch.jobs.sampling import SamplingParams
from swiftbatch.worker.drafters import shared_budget
from swiftbatch.worker.drafters.base import Drafter, DraftRequest
from swiftbatch.worker.drafters.row_shares import best_shares
from swiftbatch.worker.drafters.shared_budget import BudgetedDrafter
from swiftbatch.worker.drafters.step_clock import StepClock
from swiftbatch.worker.drafters.tree_budget import (
    LOOK_EVERY,
    NODE_CHOICES,
    PROMISING,
    LookRhythm,
    NodeAcceptance,
    NodeBudget,
)
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.drawing.tree import DraftTree
from swiftbatch.worker.drawing.verification import Verification
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.kernels.sizes import TILE_ROWS
from swiftbatch.worker.model.files import locate_model
from swiftbatch.worker.target import step_costs
from swiftbatch.worker.target.step_costs import ROW_COUNTS, StepCosts, measure_step_costs
from swiftbatch.worker.target.target import TargetModel
from tests.simulated_clock import SimulatedClock
from tests.worker.drafters.drafter_parts import free_rows

FREE_ROWS = free_rows()
CHEAP_ROWS = StepCosts((64, 8192), 0.001 * np.array([[0.9, 0.92, 0.95, 1.0, 1.05, 1.1]] * 2))
DEAR_ROWS = StepCosts((64, 8192), np.array([[1.0, 1.05, 1.1, 1.2, 1.5, 2.0], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]]))


def test_nodes_that_cost_nothing_are_all_taken() -> None:
    assert NodeBudget(FREE_ROWS).best(1000, num_sequences=1, proposing=0.0).num_nodes == TILE_ROWS - 1


def test_where_rows_are_dear_a_long_cache_gets_fewer_nodes() -> None:
    budget = NodeBudget(DEAR_ROWS)
    assert budget.best(64, 1, 0.0).num_nodes > budget.best(8192, 1, 0.0).num_nodes


def test_sequences_share_a_tile() -> None:
    assert NodeBudget(FREE_ROWS).best(64, num_sequences=4, proposing=0.0).num_nodes == 7
    assert NodeBudget(FREE_ROWS).best(64, num_sequences=100, proposing=0.0).num_nodes == 1


def test_acceptance_that_falls_takes_nodes_away() -> None:
    budget = NodeBudget(DEAR_ROWS)
    before = budget.best(64, 1, 0.0).num_nodes
    for _ in range(24 * 20):
        budget.observe(31, [])
    assert budget.best(64, 1, 0.0).num_nodes < before


def test_costs_are_linear_between_and_beyond_what_was_measured() -> None:
    assert DEAR_ROWS.at(12, 64) == pytest.approx(1.35)
    assert DEAR_ROWS.at(32, 8192 + 8128) == pytest.approx(62.0)


def test_measured_costs_rise_with_rows_and_length(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a forward takes a millisecond here for every thousand positions before it."""
    clock = SimulatedClock()
    clock.rule(monkeypatch)
    verify = clock.taking(lambda groups: sum(len(g) * g.first_entry for g in groups) / 1e6, target.verify)
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
    budget = NodeBudget(StepCosts((64,), np.ones((1, 6))))
    for _ in range(20):
        budget.observe(8, [])
    assert budget.state()[0] < 0.25  # the prior says 0.6; at the final rate alone it would still be 0.4


class Chains(BudgetedDrafter):
    """Chains as long as they may be."""

    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        return DraftTree.chain([0] * min(max_nodes, max_depth))


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_trees_are_as_large_as_pays_for_sequences_that_share_a_forward(num_sequences: int) -> None:
    sequence = Sequence("a", [1] * 8193, SamplingParams(max_tokens=9), 10)
    lengths = []
    for overhead in (0.0, 100.0):  # what a step takes beside its forward makes larger trees pay
        trees = Chains(lambda: DEAR_ROWS).propose([DraftRequest(sequence, 127, 63, overhead)] * num_sequences)
        assert len(trees) == num_sequences
        lengths.append(len(trees[0]))
    assert lengths[0] < lengths[1]
    assert len(Chains(lambda: FREE_ROWS).propose([DraftRequest(sequence, 2, 63)])[0]) == 2
    assert len(Chains(None).propose([DraftRequest(sequence, 127, 63)])[0]) == 63


def test_no_sequences_get_no_trees() -> None:
    assert Chains(lambda: FREE_ROWS).propose([]) == Chains(None).propose([]) == []


def shares(acceptance: list[float], lengths: list[int], costs: StepCosts = DEAR_ROWS) -> list[int]:
    """Nodes of sequences whose every node is accepted in such a share of steps in which its parent was."""
    tokens = [[1.0 + sum(share**i for i in range(1, nodes + 1)) for nodes in NODE_CHOICES] for share in acceptance]
    chosen = best_shares(costs, np.array(tokens), np.array(lengths), overhead=0.0, proposing=0.0)
    return [NODE_CHOICES[choice] for choice in chosen]


def test_rows_go_where_the_text_repeats_itself() -> None:
    repeating, *others = shares([0.98, 0.05, 0.05, 0.05], [64] * 4)
    assert repeating > 5
    assert others == [0, 0, 0]


def test_rows_go_where_they_are_cheap() -> None:
    short, long = shares([0.7, 0.7], [64, 8192])
    assert short > long


def test_shares_promise_no_less_than_any_others() -> None:
    """Over all that three sequences can have: the search looks at few of them."""
    lengths, acceptance = [64, 2000, 8192], [0.9, 0.8, 0.6]
    tokens = np.array([[1.0 + sum(s**i for i in range(1, n + 1)) for n in NODE_CHOICES] for s in acceptance])
    rows, own = np.array(NODE_CHOICES) + 1, DEAR_ROWS.own_seconds(np.array(NODE_CHOICES) + 1, np.array(lengths))

    def rate(chosen: tuple[int, ...]) -> float:
        picked = np.arange(3), np.array(chosen)
        seconds = DEAR_ROWS.shared_seconds(int(rows[list(chosen)].sum())) + own[picked].sum()
        return float(tokens[picked].sum() / seconds)

    best = max(map(rate, itertools.product(range(len(NODE_CHOICES)), repeat=3)))
    found = best_shares(DEAR_ROWS, tokens, np.array(lengths), 0.0, 0.0)
    assert rate(tuple(found)) > 0.97 * best


def test_seconds_of_many_sequences_at_once_are_those_of_each() -> None:
    rows, lengths = np.array([1, 2, 12, 32]), np.array([0, 64, 5000, 8192, 20_000])
    own = DEAR_ROWS.own_seconds(rows, lengths)
    for i, length in enumerate(lengths.tolist()):
        for j, number in enumerate(rows.tolist()):
            alone = DEAR_ROWS.shared_seconds(number) + own[i, j]
            assert alone == pytest.approx(DEAR_ROWS.at(number, length))
            assert alone == pytest.approx(DEAR_ROWS.forward_seconds(number, length, 1))


def test_where_nothing_pays_nothing_is_drafted_but_a_look_now_and_then() -> None:
    sequence = Sequence("a", [1] * 65, SamplingParams(max_tokens=9), 10)
    drafter, sizes = Chains(lambda: DEAR_ROWS), []
    for _ in range(40 * LOOK_EVERY):
        [tree] = drafter.propose([DraftRequest(sequence, 127, 63)])
        sizes.append(len(tree))
        drafter.update(sequence, Verification(tree, [], [1], np.zeros(1 + len(tree), dtype=int), None, None))
    looks = [step for step, size in enumerate(sizes) if size]
    waits = np.diff(looks[-5:])
    assert (waits[1:] >= waits[:-1]).all()
    assert LOOK_EVERY < waits[-1] <= 1 + 16 * LOOK_EVERY
    for _ in range(30 * LOOK_EVERY):  # the text begins to repeat itself
        [tree] = drafter.propose([DraftRequest(sequence, 127, 63)])
        path = list(range(len(tree)))
        drafter.update(sequence, Verification(tree, path, [1], np.zeros(1 + len(tree), dtype=int), None, None))
        sizes.append(len(tree))
    assert 0 not in sizes[-LOOK_EVERY:]


@pytest.fixture
def even_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which every step takes what the costs say."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: 0.001 * next(ticks))
    monkeypatch.setattr(StepClock, "beside", lambda *_: 0.0)


def plain_steps(drafter: Chains, sequence: Sequence, number: int) -> list[int]:
    """The sizes of the trees of so many steps, none of whose nodes is accepted."""
    sizes = []
    for _ in range(number):
        [tree] = drafter.propose([DraftRequest(sequence, 127, 63)])
        drafter.update(sequence, Verification(tree, [], [1], np.zeros(1 + len(tree), dtype=int), None, None))
        sizes.append(len(tree))
    return sizes


@pytest.mark.usefixtures("even_steps")
def test_steps_that_draft_nothing_are_not_planned_until_something_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask for nothing at every step takes a twentieth of a short one."""
    drafter, asked = Chains(lambda: DEAR_ROWS), []
    assert drafter.budget is not None
    num_nodes = drafter.budget.num_nodes
    monkeypatch.setattr(
        drafter.budget, "num_nodes", lambda requests: asked.append(len(requests)) or num_nodes(requests)
    )
    first, second = (Sequence(name, [1] * 65, SamplingParams(max_tokens=9), 10) for name in "ab")
    plain_steps(drafter, first, 400)
    asked.clear()
    plain_steps(drafter, first, 160)
    assert 0 < len(asked) <= 160 // 8
    asked.clear()
    for _ in range(3):  # another one shares the steps: it is asked about at once
        drafter.propose([DraftRequest(first, 127, 63), DraftRequest(second, 127, 63)])
    assert asked[0] == 2


@pytest.mark.usefixtures("even_steps")
def test_where_looks_found_nothing_in_a_job_the_next_one_is_looked_at_as_seldom() -> None:
    """A look at every eighth step takes a thirtieth of a short job."""
    drafter, looks = Chains(lambda: DEAR_ROWS), []
    for name in "abcdef":
        sequence = Sequence(name, [1] * 65, SamplingParams(max_tokens=9), 10)
        looks.append(sum(size > 0 for size in plain_steps(drafter, sequence, 64)))
        drafter.stop(sequence)
    assert looks[0] > looks[-1]
    assert looks[-1] <= 1


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sequences of each plan that is made."""
    found: list[int] = []

    def noted(costs: StepCosts, tokens: np.ndarray, *others: Any) -> np.ndarray:
        found.append(len(tokens))
        return best_shares(costs, tokens, *others)

    monkeypatch.setattr(shared_budget, "best_shares", noted)
    return found


@pytest.mark.usefixtures("even_steps")
def test_where_nothing_is_learned_nothing_is_planned_again(planned: list[int]) -> None:
    """A plan takes half of a short step: a look tells something, a plain step does not."""
    drafter, sequence = Chains(lambda: DEAR_ROWS), Sequence("a", [1] * 65, SamplingParams(max_tokens=9), 10)
    plain_steps(drafter, sequence, 1000)
    planned.clear()
    num_looks = sum(size > 0 for size in plain_steps(drafter, sequence, 2000))
    assert 5 < num_looks < 60
    assert len(planned) <= num_looks + 1


def test_trees_that_are_slower_than_their_costs_say_are_left_for_plain_steps(
    planned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promised is a tenth more than plain steps bring: here a step with a tree takes twice as long as one without."""
    now, rising = [0.0], StepCosts((64, 8192), np.array([[0.001 + 0.00045 * (n > 1) for n in ROW_COUNTS]] * 2))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    sequence, drafter = Sequence("a", [1] * 65, SamplingParams(max_tokens=9), 10), Chains(lambda: rising)
    sizes = []
    for step in range(400):
        [tree] = drafter.propose([DraftRequest(sequence, 127, 63)])
        sizes.append(len(tree))
        now[0] += 0.002 if len(tree) else 0.001
        if step == 100:
            planned.clear()
        path = list(range(len(tree)))[:1] if len(sizes) % 5 < 3 else []
        drafter.update(sequence, Verification(tree, path, [1], np.zeros(1 + len(tree), dtype=int), None, None))
    assert sum(size > 0 for size in sizes[:100]) > 18
    assert sum(size > 0 for size in sizes[-200:]) < 40
    assert planned, "texts grow meanwhile: what trees promise is planned for again now and then"


def test_where_trees_were_slow_for_a_moment_they_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is learned of trees that are not made: what a neighbour did to the first ones held for ever."""
    now, slowness, sizes = [0.0], 3.0, list[int]()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    sequence, drafter = Sequence("a", [1] * 65, SamplingParams(max_tokens=9), 10), Chains(lambda: CHEAP_ROWS)
    for step in range(2400):
        [tree] = drafter.propose([DraftRequest(sequence, 127, 63)])
        sizes.append(len(tree))
        now[0] += 0.001 * (slowness if len(tree) and step < 60 else 1.0)
        path = list(range(len(tree)))[:1] if step % 5 else []
        drafter.update(sequence, Verification(tree, path, [1], np.zeros(1 + len(tree), dtype=int), None, None))
    assert sum(size > 0 for size in sizes[60:120]) < 15  # looks alone
    assert sum(size > 0 for size in sizes[-100:]) > 80


@pytest.mark.usefixtures("even_steps")
def test_a_job_in_place_of_another_like_it_goes_on_resting(planned: list[int]) -> None:
    """A plan, a look and what is asked around them take a thirtieth of a short job."""
    drafter = Chains(lambda: DEAR_ROWS)
    first, second, longer = (
        Sequence(name, [1] * n, SamplingParams(max_tokens=9), 10) for name, n in zip("abc", (65, 70, 130), strict=True)
    )
    plain_steps(drafter, first, 400)
    drafter.stop(first)
    planned.clear()
    assert sum(plain_steps(drafter, second, 30)) == 0
    assert not planned
    drafter.stop(second)
    plain_steps(drafter, longer, 1)
    assert planned == [1]


def test_small_trees_tell_of_large_ones() -> None:
    """Looks are small: where none of their nodes comes, no more of those behind them would."""
    acceptance = NodeAcceptance()
    before = acceptance.tokens(NODE_CHOICES)
    for _ in range(100):
        acceptance.learn(3, [])
    assert acceptance.tokens(NODE_CHOICES)[-1] < 1.5 < before[-1]
    for _ in range(100):
        acceptance.learn(3, [0, 1, 2])
    assert acceptance.tokens(NODE_CHOICES)[-1] > 0.9 * (before[-1] + 1)


def test_looks_come_more_seldom_until_one_finds_a_text_that_repeats_itself() -> None:
    rhythm, waits = LookRhythm(shortest=4), []
    for num_accepted in (0, 1, 2, PROMISING, 0):
        waited = 0
        while not rhythm.is_due:
            rhythm.observe(is_drafted=False)
            waited += 1
        waits.append(waited)
        rhythm.observe(is_drafted=True, num_accepted=num_accepted)
    assert waits == [4, 8, 16, 32, 4]


def test_a_look_that_finds_nothing_to_draft_is_over() -> None:
    rhythm, waits = LookRhythm(shortest=4), []
    for step in range(40):
        if rhythm.is_due:
            waits.append(step)
        rhythm.observe(is_drafted=False)
    assert waits == [4, 13, 30]


def test_a_drafter_learns_what_pays() -> None:
    sequence = Sequence("a", [1] * 9, SamplingParams(max_tokens=9), 10)
    drafter = Chains(lambda: DEAR_ROWS)
    [before] = drafter.propose([DraftRequest(sequence, 127, 63)])
    for _ in range(24 * 20):
        drafter.update(sequence, Verification(DraftTree.chain([0] * 31), [], [1], np.zeros(32, dtype=int), None, None))
    [after] = drafter.propose([DraftRequest(sequence, 127, 63)])
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
    monkeypatch.setattr(target, "verify", clock.taking(lambda groups: 1.0, target.verify))
    engine = Engine(target, drafter)
    sequence = Sequence("a", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), target.vocab_size)
    engine.start(sequence)
    while sequence.finish_reason is None:
        engine.step()
    assert drafter.overheads[0] == 0.0
    assert drafter.overheads[1:] == pytest.approx([0.25] * len(drafter.overheads[1:]))


@pytest.mark.parametrize(("place", "number"), [(TILE_ROWS, -9.0), (TILE_ROWS + 2, 1e18)], ids=["steps", "interval"])
def test_a_state_that_would_end_a_run_or_all_looks_is_refused(place: int, number: float) -> None:
    budget = NodeBudget(FREE_ROWS)
    before = budget.state()
    damaged = before.copy()
    damaged[place] = number
    with pytest.raises(ValueError, match=r"node budget|rhythm of looks"):
        budget.restore(damaged)
    assert (budget.state() == before).all()
