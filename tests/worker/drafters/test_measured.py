"""Two ways to draft: the faster one by the clock, with occasional tries of the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.auto import mtp_trials
from swiftbatch.worker.drafters.auto.auto import auto
from swiftbatch.worker.drafters.auto.mtp_trials import FIRST_PERIOD, TRIAL, TrialDrafter
from swiftbatch.worker.drafters.auto.repeated_text import RepeatingDrafter
from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.verification import Verification
from tests.worker.drafters.drafter_parts import free_rows


class Predicting(Drafter):
    """Drafts one wrong token and counts its updates."""

    needs_hidden = True

    def __init__(self) -> None:
        self.heard = 0  # hidden states

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        self.heard = 0

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return [DraftTree.chain([0]) if request.max_depth > 0 else DraftTree() for request in requests]

    def read(self, sequence: Sequence, position: int, hidden: torch.Tensor) -> None:
        assert position == self.heard
        self.heard += len(hidden)

    def update(self, sequence: Sequence, verification: Verification) -> None:
        assert verification.hidden is not None
        self.read(sequence, len(sequence) - len(verification.committed_ids) - 1, verification.hidden)


class Clock:
    """Steps with `Predicting` take `factor` seconds, all others one."""

    def __init__(self, factor: float) -> None:
        self.now, self.factor = 0.0, factor
        self.drafter: TrialDrafter | None = None

    def __call__(self) -> float:
        self.now += self.factor if self.drafter is not None and self.drafter.is_predicting else 1.0
        return self.now


def run(target: TargetModel, factor: float, num_tokens: int) -> tuple[list[bool], Sequence]:
    clock, repeating = Clock(factor), auto(target, free_rows, None)
    assert isinstance(repeating, RepeatingDrafter)
    clock.drafter = drafter = TrialDrafter(repeating, Predicting(), clock)
    engine = Engine(target, drafter)
    sampling = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=3, ignore_eos=True)
    sequence = Sequence("a", [1, 2, 3, 4, 5], sampling, target.vocab_size)
    engine.start(sequence)
    went = []
    while sequence.finish_reason is None:
        engine.step()
        went.append(drafter.is_predicting)
    assert isinstance(drafter.predicting, Predicting)
    assert drafter.predicting.heard == len(sequence) - 1
    return went, sequence


@pytest.fixture(scope="module")
def small(tiny_model: Path) -> TargetModel:
    from swiftbatch.worker.model.model_files import locate_model

    return TargetModel.load(locate_model(str(tiny_model)), "float32", "cpu")


def test_a_way_that_is_faster_is_stayed_with_and_a_slower_one_is_tried_for_a_turn_alone(small: TargetModel) -> None:
    fast, text = run(small, 0.01, 400)
    slow, same = run(small, 100.0, 400)
    assert text.token_ids.tolist() == same.token_ids.tolist()
    assert not any(fast[:FIRST_PERIOD])
    assert all(fast[FIRST_PERIOD : FIRST_PERIOD + TRIAL + 30])
    assert sum(slow[: FIRST_PERIOD + TRIAL + 30]) == TRIAL


class Distant(Predicting):
    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        self.positions = set[int]()

    def read(self, sequence: Sequence, position: int, hidden: torch.Tensor) -> None:
        self.positions |= set(range(position, position + len(hidden)))


def test_hidden_states_are_taken_of_what_is_read_and_near_the_steps_that_predict_alone(
    small: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp_trials, "HEARD", 8)
    repeating, predicting = auto(small, free_rows, None), Distant()
    assert isinstance(repeating, RepeatingDrafter)
    drafter = TrialDrafter(repeating, predicting, Clock(1.0))
    engine = Engine(small, drafter)
    sampling = SamplingParams(max_tokens=200, temperature=1.0, seed=3, ignore_eos=True)
    sequence = Sequence("a", [1, 2, 3, 4, 5], sampling, small.vocab_size)
    engine.start(sequence)
    expected, num_steps = set(range(4)), 0
    while num_steps < FIRST_PERIOD + TRIAL + 30:
        before, num_steps = len(sequence), num_steps + 1
        engine.step()
        assert drafter.is_predicting == (FIRST_PERIOD < num_steps <= FIRST_PERIOD + TRIAL)
        if FIRST_PERIOD - 8 < num_steps <= FIRST_PERIOD + TRIAL:
            expected |= set(range(before - 1, len(sequence) - 1))
    assert sequence.finish_reason is None
    assert predicting.positions == expected
