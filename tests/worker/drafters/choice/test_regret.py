"""The loss of the choice of drafts against the best choice, on simulated machines whose speed wanders.

The clock is simulated: a step takes the seconds of its rows, times a factor that wanders as a shared machine's speed
does. So the figures are the policy's own, and the same everywhere.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from swiftbatch.worker.drafters.choice.choosing_drafter import ChoosingDrafter
from swiftbatch.worker.drafters.choice.tree_sizes import NODE_CHOICES
from swiftbatch.worker.drafters.choice.ways import TreeWay
from swiftbatch.worker.drafters.drafter_interface import DraftRequest, TreeDrafter
from swiftbatch.worker.sampling.draft_tree import DraftTree, Verification
from swiftbatch.worker.sampling.sequence import Sequence

STEP_SECONDS, ROW_SECONDS, PROPOSING_SECONDS = 0.5e-3, 0.035e-3, 0.05e-3
FALL = 0.6 ** np.arange(31)  # of the acceptance of nodes, best first
MAX_ROWS = 31
NUM_JOBS, JOB_TOKENS = 8, 256
WANDERING, MEMORY = 0.2, 0.98  # of the logarithm of the speed: its spread, and what a step keeps of the last one's


class _Costs:
    """The true costs of rows, as a quiet machine's probe would have them."""

    has_experts, rows_per_forward, narrow_rows = False, 1, ()

    def as_routed(self) -> _Costs:
        return self

    def own_seconds(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return np.outer(np.ones(len(lengths)), rows) * 0.3 * ROW_SECONDS

    def shared_seconds(self, num_rows: int) -> float:
        return STEP_SECONDS + 0.7 * ROW_SECONDS * num_rows

    def row_prices(self, num_rows: int) -> list[float]:
        return [0.7 * ROW_SECONDS]


class _Text:
    """The parts of a sequence that a policy needs."""

    def __init__(self, name: str) -> None:
        self.sequence_id, self.length, self.num_remaining_tokens = name, 2048, JOB_TOKENS

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


class _Trees(TreeDrafter):
    """Trees without tokens that mean anything."""

    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        return DraftTree.chain([0] * min(max_nodes, max_depth))


class _Machine:
    """A machine that the jobs of a drafter run on, and how fast it is."""

    def __init__(self, gain: float, seed: int) -> None:
        self.now = self.plain_seconds = self._speed = 0.0
        costs = cast(Any, _Costs())
        self.drafter = ChoosingDrafter(costs, TreeWay(_Trees(), costs), clock=lambda: self.now)
        self._generator, self._acceptance = np.random.default_rng(seed), _acceptance(gain)

    def step(self, text: Any) -> int:
        """Return the tokens of a step, or of several plain ones."""
        [tree] = self.drafter.propose([DraftRequest(text, MAX_ROWS, MAX_ROWS)])
        num_nodes, num_steps = len(tree), 1 + self.drafter.pass_plain(31)
        path = [node for node in range(num_nodes) if self._generator.random() < self._acceptance[node]]
        num_tokens = len(path) + num_steps
        for _ in range(num_steps):
            self._speed = MEMORY * self._speed + WANDERING * np.sqrt(1 - MEMORY**2) * self._generator.normal()
            factor = np.exp(self._speed) * (3 if self._generator.random() < 0.01 else 1)
            self.now += _seconds(num_nodes) * factor
            self.plain_seconds += _seconds(0) * factor * (1 + len(path))
        verification = Verification(tree, path, [1] * num_tokens, [1], None, None, num_steps=num_steps)
        text.length += num_tokens
        self.drafter.update_all([(text, verification)])
        return num_tokens


def _rate(gain: float, seed: int) -> float:
    """Return the rate beside plain decoding's on the same machine at the same moments."""
    machine = _Machine(gain, seed)
    for job in range(NUM_JOBS):
        text, num_tokens = _Text(f"job {job}"), 0
        while num_tokens < JOB_TOKENS:
            num_tokens += machine.step(text)
        machine.drafter.stop(cast(Any, text))
    return machine.plain_seconds / machine.now


@pytest.mark.parametrize("gain", [0.7, 0.95])
def test_where_drafts_bring_nothing_at_most_2_percent_of_plain_decoding_are_lost(gain: float) -> None:
    assert min(_rate(gain, seed) for seed in range(10)) >= 0.98


@pytest.mark.parametrize("gain", [1.05, 1.2, 1.5])
def test_where_drafts_pay_5_percent_of_the_best_rate_are_lost_and_at_worst_8(gain: float) -> None:
    rates = sorted(_rate(gain, seed) / gain for seed in range(10))
    assert rates[len(rates) // 2] >= 0.95
    assert rates[0] >= 0.92
