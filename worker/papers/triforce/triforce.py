"""TriForce (Sun et al. 2024): a small draft model proposes, the target with a summarised cache checks.

The paper's retrieval cache, which leaves out what it does not retrieve, is one of those that `bench` compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swiftbatch.worker.caches.partial import PartialCacheFactory
from swiftbatch.worker.caches.summary import SummaryKVCache
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.drafters.two_level.chain import RoundPlan
from swiftbatch.worker.drafters.two_level.drafter import TwoLevelDrafter
from swiftbatch.worker.drafters.two_level.round_plan import planner_of
from swiftbatch.worker.papers.triforce.draft_model import DraftModel
from swiftbatch.worker.papers.triforce.proposer import DraftModelProposer
from swiftbatch.worker.target.step_costs import Costs
from swiftbatch.worker.target.target import TargetModel


@dataclass(frozen=True)
class TriForceOptions:
    """The paper's parameters. Defaults are what is fastest; the paper's own are in `worker/bench/bench_variants.py`."""

    cache: PartialCacheFactory = SummaryKVCache  # what the middle level sees
    budget: int = ENGINES["triforce"].partial_budget
    gammas: tuple[int, int] | None = None  # gamma_1, gamma_2; None: as many as pay
    width: int = 1  # candidates at every depth of the first level


DEFAULTS = TriForceOptions()


def triforce(
    target: TargetModel, costs: Costs, parts_folder: Path | None, options: TriForceOptions = DEFAULTS
) -> TwoLevelDrafter:
    """A `DrafterFactory`. Raises ModelError where there is no draft model for this target."""
    draft_model = DraftModel.load(parts_folder, target)
    proposer = DraftModelProposer(draft_model, options.width, target.forwards.new_drawing())
    plan = None if options.gammas is None else hierarchy(*options.gammas, options.width)
    planner = planner_of(plan, costs, options.budget, proposer.node_seconds)
    return TwoLevelDrafter(target, proposer, planner, options.cache, options.budget)


def hierarchy(gamma_1: int, gamma_2: int, width: int) -> RoundPlan:
    """Algorithm 1: `gamma_1` draft tokens per middle verification, until there are at least `gamma_2` tokens.

    gamma_1 = 0 is self-speculation with the partial cache alone.
    """
    return RoundPlan(gamma_2, gamma_1 * width, gamma_2, gamma_2)
