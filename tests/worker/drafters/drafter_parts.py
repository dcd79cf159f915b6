from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest
from swiftbatch.worker.drafters.self_speculation import SelfSpeculationDrafter
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.step_costs import StepCosts
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence


def free_rows() -> StepCosts:
    """All nodes pay, and drafting is negligible."""
    return StepCosts((64, 8192), np.array([[4.0] * 6, [5.0] * 6]))


def dear_rows() -> StepCosts:
    """Return costs by which a row takes as long as a forward, so that no drafts pay."""
    return StepCosts((64, 8192), np.outer([1.0, 2.0], [1, 2, 4, 8, 16, 32]) * 4.0)


def proposed(drafter: Drafter, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
    [tree] = drafter.propose([DraftRequest(sequence, max_nodes, max_depth)])
    return tree


def run_to_ends(engine: Engine, *sequences: Sequence) -> Engine:
    """Sequences keep their slots."""
    for sequence in sequences:
        engine.start(sequence)
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()
    return engine


def run_together(engine: Engine, sequences: Iterable[Sequence]) -> None:
    for sequence in run_to_ends(engine, *sequences).sequences:
        engine.stop(sequence)


def check_resumed(
    target: TargetModel, sequence: Sequence, num_tokens: int, undisturbed: Drafter, resumed: Drafter
) -> DraftTree:
    """Check the tree after `num_tokens` against that of a resumed drafter; return it."""
    engine = Engine(target, undisturbed)
    slot = engine.start(sequence)
    while sequence.num_generated_tokens < num_tokens:
        engine.step()
    resumed.start(sequence, slot.cache)
    resumed.restore(sequence, undisturbed.state(sequence))
    first, second = (proposed(drafter, sequence, 31, 20) for drafter in (undisturbed, resumed))
    assert first == second
    return first


def check_same_entries(undisturbed: SelfSpeculationDrafter, resumed: SelfSpeculationDrafter) -> None:
    """Check that two drafters' partial caches for sequence `a` agree."""
    ours, theirs = (drafter._tracked["a"].partial for drafter in (undisturbed, resumed))
    num_entries = ours._num_sequence_entries
    assert theirs._num_sequence_entries == num_entries
    assert ours._buffer[:, :, :, :num_entries].equal(theirs._buffer[:, :, :, :num_entries])
