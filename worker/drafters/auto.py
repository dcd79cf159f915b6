"""The default engine: it measures its ways to draft and uses the fastest.

Its ways are trees of recycled candidates, repeats in the text, chains drawn with scanned keys, and a checkpoint's MTP
layer if it has one.
"""

from __future__ import annotations

from pathlib import Path

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.drafters.catalogue import ENGINES, MTP, engine_entry
from swiftbatch.worker.drafters.choice.choosing_drafter import ChoosingDrafter
from swiftbatch.worker.drafters.choice.repeated_text import RepeatWay
from swiftbatch.worker.drafters.choice.rounds import (
    ON_A_CPU,
    RoundCosts,
    RoundsPlanner,
    costs_beside_a_gpu,
    costs_on_a_gpu,
)
from swiftbatch.worker.drafters.choice.ways import ChainWay, DraftWay, MeasuredWay, TreeWay
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.drafters.token_recycling import TokenRecyclingDrafter
from swiftbatch.worker.forward.step_costs import Costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.scan_cache import SHORTEST_SCANNED

NUM_BEST = ENGINES["auto"].scanned_best  # keys that a query of a round sees exactly


def auto(target: TargetModel, costs: Costs, parts_folder: Path | None) -> ChoosingDrafter:
    """Make the drafter. It draws chains only if our kernels scan keys and all layers see the whole text."""
    trees, rounds = TreeWay(TokenRecyclingDrafter(target), costs()), round_costs(target)
    chains = None if rounds is None else ChainWay(target, RoundsPlanner(costs(), rounds), trees, NUM_BEST)
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


def round_costs(target: TargetModel) -> RoundCosts | None:
    """Return the costs of rounds, or None if no kernel scans all keys that layers see, or if texts stay short.

    Recurrent layers also rule rounds out: their state covers the whole text and cannot be read in part.
    """
    if target.forwards.has_windows or target.cache_shape.recurrent is not None:
        return None
    if target.forwards.team is not None:
        return ON_A_CPU
    arena = target.forwards.arena
    if arena is None or arena.longest_job < SHORTEST_SCANNED:
        return None
    costs_of = costs_on_a_gpu if arena.holds_all else costs_beside_a_gpu
    return costs_of(arena.shape.head_dim, arena.shape.dtype.itemsize)
