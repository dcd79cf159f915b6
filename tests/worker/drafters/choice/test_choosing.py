"""What a choosing drafter tells of its steps: their tokens, and what a row must bring."""

from __future__ import annotations

import numpy as np
import pytest

from swiftbatch.worker.drafters.auto import auto
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.drafters.choice.choosing_drafter import ChoosingDrafter
from swiftbatch.worker.drafters.choice.policy import StepCall
from swiftbatch.worker.drafters.drafter_interface import DraftRequest
from swiftbatch.worker.forward.step_costs import ROW_COUNTS, StepCosts
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.sampling.draft_tree import GUESSED, DraftTree, Verification
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.drafters.choice.test_auto import new_sequence
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.kernels.kernel_parts import needs_kernels

pytestmark = needs_kernels


def drafter_with(target: TargetModel, row_seconds: float) -> tuple[ChoosingDrafter, Sequence]:
    """Return a drafter that has proposed for a sequence; a forward takes 0.1 s and `row_seconds` for each row."""
    costs = StepCosts((BLOCK,), np.array([[0.1 + row_seconds * number for number in ROW_COUNTS]]))
    drafter, sequence = auto(target, lambda: costs, None), new_sequence(target, "T=0", 40, 50)
    drafter.start(sequence, target.new_cache(sequence.max_length))
    drafter.propose([DraftRequest(sequence, 31, 31)])
    return drafter, sequence


def test_tokens_that_no_way_drafted_do_not_count_for_a_way(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, sequence = drafter_with(target, 0.001)
    calls: list[StepCall] = []
    monkeypatch.setattr(drafter.policy, "observe", lambda way, call, seconds, expected: calls.append(call))
    committed = [5, 6, 7, 8]
    sequence.extend(committed)
    tree = DraftTree.chain(committed[:3])
    drafter.update_all(
        [(sequence, Verification(tree, [0, 1, 2], committed, [4, 5, 6, 7], None, None, numbers=[0, 1, 2]))]
    )
    guessed = Verification(tree, [0, 1, 2], committed, [4, 5, 6, 7], None, None, numbers=[0, GUESSED, GUESSED])
    sequence.extend(committed)
    drafter.update_all([(sequence, guessed)])
    assert [call.num_tokens for call in calls] == [4, 2]


def test_rows_must_bring_what_they_take_of_a_step(target: TargetModel) -> None:
    cheap, fair, dear = (drafter_with(target, row_seconds)[0].row_prices(1, 40) for row_seconds in (0.0001, 0.01, 0.1))
    assert 0.0 < cheap[0] < 0.02 < fair[0] < 0.3 < dear[0] < 1.0
    assert np.allclose(np.diff(fair), fair[0])


def test_plain_decoding_has_no_guesses(target: TargetModel) -> None:
    assert not create_drafter("autoregressive", target, free_rows).row_prices(1, 40)


def test_without_room_for_nodes_a_step_is_plain(target: TargetModel) -> None:
    drafter, sequence = drafter_with(target, 0.0001)
    for number in range(3):
        sequence.extend([number])
        drafter.update_all([(sequence, Verification(DraftTree(), [], [number], [number], None, None))])
        trees = drafter.propose([DraftRequest(sequence, 0, 0)])
        assert (trees, drafter.way) == ([DraftTree()], "plain")
