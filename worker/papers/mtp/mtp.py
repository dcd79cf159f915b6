"""The engine that drafts with a layer that predicts further tokens (MTP), of the checkpoint or trained.

A chain of up to four tokens, and beside each what else may well come: as much of it as pays. Drafts grow, and their
prices are planned, as GRIFFIN's.
"""

from __future__ import annotations

from pathlib import Path

import torch

from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.papers.griffin.griffin import GriffinDrafter, GriffinOptions
from swiftbatch.worker.papers.griffin.griffin_tree import PricePlanner
from swiftbatch.worker.papers.mtp.mtp_forwards import MTPForwards
from swiftbatch.worker.papers.mtp.predictor_weights import load_predictor
from swiftbatch.worker.target.step_costs import Costs
from swiftbatch.worker.target.target import TargetModel

NUM_CANDIDATES = 4  # beside each other, of which the best one is gone on from
OPTIONS = GriffinOptions(max_depth=4, max_nodes=4 * NUM_CANDIDATES, num_expanded=1)


def mtp(target: TargetModel, costs: Costs, parts_folder: Path | None) -> MTPDrafter:
    """A `DrafterFactory`. Raises ModelError where there is no such layer for this target, or nothing to run it."""
    forwards = MTPForwards(load_predictor(parts_folder, target), target, NUM_CANDIDATES)
    return MTPDrafter(forwards, PricePlanner(costs(), forwards.level_seconds()), OPTIONS)


class MTPDrafter(GriffinDrafter):
    """GRIFFIN's drafter with another model: it takes in what is read, too, and asks for nothing of it again."""

    reads_caches = False

    def read(self, sequence: Sequence, position: int, hidden: torch.Tensor) -> None:
        self._forwards.take(sequence.sequence_id, position, hidden)
