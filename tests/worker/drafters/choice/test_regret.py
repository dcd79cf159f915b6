"""The loss of the choice of drafts against the best choice, on simulated machines whose speed wanders.

The clock is simulated: a step takes the seconds of its rows, times a factor that wanders as a shared machine's speed
does. So the figures are the policy's own, and the same everywhere.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from swiftbatch.worker.drafters import step_clock
from swiftbatch.worker.drafters.drafter_interface import DraftRequest
from swiftbatch.worker.drafters.shared_budget import NUM_TRIED, SharedBudget
from swiftbatch.worker.drafters.tree_budget import NODE_CHOICES

STEP_SECONDS, ROW_SECONDS, PROPOSING_SECONDS = 0.5e-3, 0.035e-3, 0.05e-3
FALL = 0.6 ** np.arange(31)  # of the acceptance of nodes, best first
MAX_ROWS = 31
NUM_JOBS, JOB_TOKENS = 8, 256
WANDERING, MEMORY = 0.2, 0.98  # of the logarithm of the speed: its spread, and what a step keeps of the last one's


class _Costs:
    """The true costs of rows, as a quiet machine's probe would have them."""

    has_experts, rows_per_forward = False, 1

    def as_routed(self) -> _Costs:
        return self

    def own_seconds(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return np.outer(np.ones(len(lengths)), rows) * 0.3 * ROW_SECONDS

    def shared_seconds(self, num_rows: int) -> float:
        return STEP_SECONDS + 0.7 * ROW_SECONDS * num_rows

    def row_prices(self, num_rows: int) -> list[float]:
        return [0.7 * ROW_SECONDS]


class _Text:
    """The parts of a sequence that a budget needs."""

    def __init__(self, name: str) -> None:
        self.sequence_id, self.length = name, 2048

    def __len__(self) -> int:
        return self.length


def _seconds(num_nodes: int) -> float:
    return STEP_SECONDS + ROW_SECONDS * (num_nodes + 1) + PROPOSING_SECONDS * (num_nodes > 0)


def _acceptance(gain: float) -> np.ndarray:
    """Shares of steps that accept node i, such that the best size of trees has `gain` times plain decoding's rate."""
    shares = np.linspace(0.0, 3.0, 3001)
    gains = [
        max((1 + share * FALL[:nodes].sum()) / _seconds(nodes) for nodes in NODE_CHOICES if nodes) * _seconds(0)
        for share in shares
    ]
    return np.minimum(shares[np.searchsorted(gains, gain)] * FALL, 1.0)


def _rate(gain: float, seed: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the rate beside plain decoding's on the same machine at the same moments."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(step_clock, "seconds_now", lambda: clock.now)
    budget, generator, acceptance = SharedBudget(cast(Any, _Costs())), np.random.default_rng(seed), _acceptance(gain)
    plain_seconds = speed = 0.0
    for job in range(NUM_JOBS):
        text, num_tokens = _Text(f"job {job}"), 0
        while num_tokens < JOB_TOKENS:
            request = [DraftRequest(cast(Any, text), MAX_ROWS, MAX_ROWS)]
            num_nodes = 0 if budget.rests(request) else budget.num_nodes(request)[0]
            path = [node for node in range(num_nodes) if generator.random() < acceptance[node]]
            speed = MEMORY * speed + WANDERING * np.sqrt(1 - MEMORY**2) * generator.normal()
            factor = np.exp(speed) * (3 if generator.random() < 0.01 else 1)
            clock.now += _seconds(num_nodes) * factor
            plain_seconds += _seconds(0) * factor * (1 + len(path))
            num_tokens += 1 + len(path)
            text.length += 1 + len(path)
            budget.observe(cast(Any, text), num_nodes, path)
        budget.forget(cast(Any, text))
    return plain_seconds / clock.now


@pytest.mark.parametrize("gain", [0.7, 0.95])
def test_where_drafts_bring_nothing_at_most_2_percent_of_plain_decoding_are_lost(
    gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert min(_rate(gain, seed, monkeypatch) for seed in range(5)) >= 0.98


@pytest.mark.parametrize("gain", [1.05, 1.2, 1.5])
def test_where_drafts_pay_at_most_5_percent_of_the_best_rate_are_lost(
    gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert min(_rate(gain, seed, monkeypatch) for seed in range(5)) >= 0.95 * gain


def test_a_trial_makes_trees_whatever_they_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_clock, "seconds_now", lambda: 0.0)
    budget, text = SharedBudget(cast(Any, _Costs())), cast(Any, _Text("job"))
    request = [DraftRequest(text, MAX_ROWS, MAX_ROWS)]
    for _ in range(100):  # nothing is accepted
        budget.observe(text, 3, [])
    assert budget.num_nodes(request) == [0]
    budget.allow_drafts(False)
    assert not budget.promises_drafts
    budget.measured_rate = 1.0
    budget.allow_drafts(True, is_trial=True)
    for _ in range(NUM_TRIED):
        assert budget.promises_drafts
        [num_nodes] = budget.num_nodes(request)
        assert num_nodes > 0
        budget.observe(text, num_nodes, [])
