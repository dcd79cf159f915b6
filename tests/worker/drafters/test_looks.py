"""Occasional test drafts while plain steps are faster."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters import shared_budget
from swiftbatch.worker.drafters.drafter_interface import DraftRequest
from swiftbatch.worker.drafters.shared_budget import best_shares
from swiftbatch.worker.drafters.step_clock import StepClock
from swiftbatch.worker.drafters.tree_budget import PROBE_EVERY, PROMISING, ProbeSchedule
from swiftbatch.worker.forward.step_costs import ROW_COUNTS, StepCosts
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.verification import Verification
from tests.worker.drafters.test_tree_budget import DEAR_ROWS, Chains

CHEAP_ROWS = StepCosts((64, 8192), 0.001 * np.array([[0.9, 0.92, 0.95, 1.0, 1.05, 1.1]] * 2))


def test_where_nothing_pays_nothing_is_drafted_but_a_look_now_and_then() -> None:
    sequence = Sequence("a", [1] * 65, SamplingParams(max_tokens=9), 10)
    drafter, sizes = Chains(lambda: DEAR_ROWS), []
    for _ in range(40 * PROBE_EVERY):
        [tree] = drafter.propose([DraftRequest(sequence, 127, 63)])
        sizes.append(len(tree))
        drafter.update(sequence, Verification(tree, [], [1], np.zeros(1 + len(tree), dtype=int), None, None))
    looks = [step for step, size in enumerate(sizes) if size]
    waits = np.diff(looks[-5:])
    assert (waits[1:] >= waits[:-1]).all()
    assert PROBE_EVERY < waits[-1] <= 1 + 16 * PROBE_EVERY
    for _ in range(30 * PROBE_EVERY):  # the text begins to repeat itself
        [tree] = drafter.propose([DraftRequest(sequence, 127, 63)])
        path = list(range(len(tree)))
        drafter.update(sequence, Verification(tree, path, [1], np.zeros(1 + len(tree), dtype=int), None, None))
        sizes.append(len(tree))
    assert 0 not in sizes[-PROBE_EVERY:]


@pytest.fixture
def even_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: 0.001 * next(ticks))
    monkeypatch.setattr(StepClock, "beside", lambda *_: 0.0)


def plain_steps(drafter: Chains, sequence: Sequence, number: int) -> list[int]:
    """Return the tree sizes of so many steps without accepted nodes."""
    sizes = []
    for _ in range(number):
        [tree] = drafter.propose([DraftRequest(sequence, 127, 63)])
        drafter.update(sequence, Verification(tree, [], [1], np.zeros(1 + len(tree), dtype=int), None, None))
        sizes.append(len(tree))
    return sizes


@pytest.mark.usefixtures("even_steps")
def test_steps_that_draft_nothing_are_not_planned_until_something_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking at every step takes a twentieth of a short one."""
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
    for _ in range(3):  # a new neighbour is asked about at once
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
    """The number of sequences of each plan."""
    found: list[int] = []

    def noted(costs: StepCosts, tokens: np.ndarray, *others: Any) -> np.ndarray:
        found.append(len(tokens))
        return best_shares(costs, tokens, *others)

    monkeypatch.setattr(shared_budget, "best_shares", noted)
    return found


@pytest.mark.usefixtures("even_steps")
def test_where_nothing_is_learned_nothing_is_planned_again(planned: list[int]) -> None:
    """A plan takes half of a short step."""
    drafter, sequence = Chains(lambda: DEAR_ROWS), Sequence("a", [1] * 65, SamplingParams(max_tokens=9), 10)
    plain_steps(drafter, sequence, 1000)
    planned.clear()
    num_looks = sum(size > 0 for size in plain_steps(drafter, sequence, 2000))
    assert 5 < num_looks < 60
    assert len(planned) <= num_looks + 1


def test_trees_that_are_slower_than_their_costs_say_are_left_for_plain_steps(
    planned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth more than plain steps was promised; here a step with a tree takes twice as long."""
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
    """Without new trees, a neighbour's disturbance would count for ever."""
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
    """A plan, a look and their questions take a thirtieth of a short job."""
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


def test_looks_come_more_seldom_until_one_finds_a_text_that_repeats_itself() -> None:
    rhythm, waits = ProbeSchedule(shortest=4), []
    for num_accepted in (0, 1, 2, PROMISING, 0):
        waited = 0
        while not rhythm.is_due:
            rhythm.observe(is_drafted=False)
            waited += 1
        waits.append(waited)
        rhythm.observe(is_drafted=True, num_accepted=num_accepted)
    assert waits == [4, 8, 16, 32, 4]


def test_a_look_that_finds_nothing_to_draft_is_over() -> None:
    rhythm, waits = ProbeSchedule(shortest=4), []
    for step in range(40):
        if rhythm.is_due:
            waits.append(step)
        rhythm.observe(is_drafted=False)
    assert waits == [4, 13, 30]
