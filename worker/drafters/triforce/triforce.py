"""TriForce (Sun et al. 2024): a small draft model proposes, the target with a summarised cache checks.

The paper's retrieval cache, which leaves out what it does not retrieve, is one of those that `bench` compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from worker.caches.draft_cache import DraftCache, DraftCacheFactory
from worker.caches.summary import SummaryKVCache
from worker.drafters.triforce.draft_model import DraftModel
from worker.drafters.triforce.proposer import DraftModelProposer
from worker.drafters.two_level.draft import DraftPlan
from worker.drafters.two_level.drafter import TwoLevelDrafter
from worker.drafters.two_level.plan import FixedPlanner, MeasuredPlanner
from worker.sequence import Sequence
from worker.target.step_costs import Costs
from worker.target.target import TargetModel


@dataclass(frozen=True)
class TriForceOptions:
    """The paper's parameters. Defaults are what is fastest; the paper's own are in `worker/bench/variants.py`."""

    cache: DraftCacheFactory = SummaryKVCache  # what the middle level sees
    budget: int = 1024
    gammas: tuple[int, int] | None = None  # gamma_1, gamma_2; None: as many as pay
    width: int = 1  # candidates at every depth of the first level


DEFAULTS = TriForceOptions()


def triforce(
    target: TargetModel, costs: Costs, parts_folder: Path | None, options: TriForceOptions = DEFAULTS
) -> TwoLevelDrafter:
    """A `DrafterFactory`. Raises ModelError where there is no draft model for this target."""
    proposer = DraftModelProposer(DraftModel.load(parts_folder, target), options.width)
    planner = (
        MeasuredPlanner(costs(), options.budget, proposer.node_seconds)
        if options.gammas is None
        else FixedPlanner(hierarchy(*options.gammas, options.width))
    )

    def new_cache(sequence: Sequence) -> DraftCache:
        return options.cache(target.cache_shape, min(options.budget, sequence.max_length), sequence)

    return TwoLevelDrafter(target, proposer, new_cache, planner)


def hierarchy(gamma_1: int, gamma_2: int, width: int) -> DraftPlan:
    """Algorithm 1: `gamma_1` draft tokens per middle verification, until there are at least `gamma_2` tokens.

    gamma_1 = 0 is self-speculation with the draft cache alone.
    """
    return DraftPlan(gamma_2, gamma_1 * width, gamma_2, gamma_2)
