"""The drafter of each arm: TriForce as the arm wants it, or the naive policy that the paper compares it with (5.1)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from swiftbatch.worker.bench.caches.compared_caches import with_cache
from swiftbatch.worker.bench.caches.retrieval import StreamingKVCache
from swiftbatch.worker.caches.partial import NUM_PINNED
from swiftbatch.worker.drafters.two_level.chain import RoundPlan
from swiftbatch.worker.drafters.two_level.drafter import TwoLevelDrafter
from swiftbatch.worker.drafters.two_level.round_plan import MeasuredPlanner
from swiftbatch.worker.papers.triforce.draft_model import DraftModel
from swiftbatch.worker.papers.triforce.proposer import DraftModelProposer
from swiftbatch.worker.papers.triforce.tables.catalogue import PromptArm
from swiftbatch.worker.papers.triforce.triforce import TriForceOptions, triforce
from swiftbatch.worker.papers.triforce.variants import PAPER
from swiftbatch.worker.target.step_costs import Costs
from swiftbatch.worker.target.target import TargetModel


def new_drafter(target: TargetModel, costs: Costs, arm: PromptArm, parts_folder: Path | None) -> TwoLevelDrafter:
    """A drafter that has seen nothing yet. Raises ModelError where no draft model fits this target."""
    if arm.plan == "naive":
        return _naive_policy(target, costs, parts_folder)
    return triforce(target, costs, parts_folder, triforce_options(arm))


def triforce_options(arm: PromptArm) -> TriForceOptions:
    return replace(PAPER if arm.plan == "paper" else TriForceOptions(), **with_cache(arm.options))


class NaivePlanner(MeasuredPlanner):
    """Never plans a round, so that the naive policy is as fast as it can be."""

    def plan(self, length: int, num_sequences: int, max_depth: int) -> RoundPlan:
        return RoundPlan(0, 0, 0, self.tree(length, num_sequences, max_depth).num_nodes)


def _naive_policy(target: TargetModel, costs: Costs, parts_folder: Path | None) -> TwoLevelDrafter:
    """Make a drafter whose draft model's tokens go straight to the full verification."""
    proposer = DraftModelProposer(DraftModel.load(parts_folder, target), 1, target.forwards.new_drawing())
    planner = NaivePlanner(costs(), NUM_PINNED, proposer.node_seconds)
    return TwoLevelDrafter(target, proposer, planner, StreamingKVCache, NUM_PINNED)  # no round ever asks for the cache
