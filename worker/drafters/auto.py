"""The default engine: it measures its ways to draft and uses the fastest.

Its ways are trees of recycled candidates, repeats in the text, chains drawn with scanned keys, and a checkpoint's MTP
layer if it has one.
"""

from __future__ import annotations

from pathlib import Path

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.drafters.catalogue import MTP, engine_entry
from swiftbatch.worker.drafters.choice.choosing_drafter import ChoosingDrafter
from swiftbatch.worker.drafters.choice.repeated_text import RepeatWay
from swiftbatch.worker.drafters.choice.rounds import RoundsPlanner
from swiftbatch.worker.drafters.choice.ways import ChainWay, DraftWay, MeasuredWay, TreeWay
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.drafters.token_recycling import TokenRecyclingDrafter
from swiftbatch.worker.forward.step_costs import Costs
from swiftbatch.worker.forward.target_model import TargetModel

NUM_BEST = 256  # keys that a query of a round sees exactly


def auto(target: TargetModel, costs: Costs, parts_folder: Path | None) -> ChoosingDrafter:
    """Make the drafter. It draws chains only where drafts can scan keys."""
    trees = TreeWay(TokenRecyclingDrafter(target), costs())
    chains = ChainWay(target, RoundsPlanner(costs()), trees, NUM_BEST) if target.forwards.can_scan else None
    predicting = _predicting(target, costs, parts_folder)
    others: dict[str, DraftWay] = {} if predicting is None else {MTP.engine: MeasuredWay(predicting)}
    return ChoosingDrafter(costs(), trees, RepeatWay(trees), chains, others)


def _predicting(target: TargetModel, costs: Costs, parts_folder: Path | None) -> Drafter | None:
    """Return the engine `mtp` if the model has a layer for it and runs where `mtp` runs, else None.

    On a GPU its memory must be planned.
    """
    arena = target.forwards.arena
    if target.forwards.team is None and not (arena is not None and arena.holds_engine):
        return None
    files = target.files
    try:
        MTP.find(files.name, files.path, files.fingerprint, parts_folder)
        return engine_entry(MTP.engine).factory()(target, costs, parts_folder)
    except ModelError:
        return None
