"""TriForce (Sun et al. 2024): a small draft model proposes, the target with a retrieval cache checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from worker.caches.draft_cache import DraftCache
from worker.caches.full import CacheShape
from worker.caches.partial import PartialKVCache
from worker.caches.retrieval import HeavyHitterKVCache, RetrievalKVCache, StreamingKVCache
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

    policy: str = "summary"
    budget: int = 1024
    chunk_size: int = 8
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
        return POLICIES[options.policy](target.cache_shape, options, sequence)

    return TwoLevelDrafter(target, proposer, new_cache, planner)


def hierarchy(gamma_1: int, gamma_2: int, width: int) -> DraftPlan:
    """Algorithm 1: `gamma_1` draft tokens per middle verification, until there are at least `gamma_2` tokens.

    gamma_1 = 0 is self-speculation with the partial cache alone.
    """
    return DraftPlan(gamma_2, gamma_1 * width, gamma_2, gamma_2)


def _retrieval(shape: CacheShape, options: TriForceOptions, sequence: Sequence) -> DraftCache:
    first_build = sequence.num_prompt_tokens - 1
    return RetrievalKVCache(shape, _budget(options, sequence), first_build, sequence.max_length, options.chunk_size)


def _streaming(shape: CacheShape, options: TriForceOptions, sequence: Sequence) -> DraftCache:
    return StreamingKVCache(shape, _budget(options, sequence), sequence.num_prompt_tokens - 1)


def _h2o(shape: CacheShape, options: TriForceOptions, sequence: Sequence) -> DraftCache:
    return HeavyHitterKVCache(shape, _budget(options, sequence))


def _topk(shape: CacheShape, options: TriForceOptions, sequence: Sequence) -> DraftCache:
    return PartialKVCache(shape, _budget(options, sequence), sequence.num_prompt_tokens - 1, period=1)


def _summary(shape: CacheShape, options: TriForceOptions, sequence: Sequence) -> DraftCache:
    return SummaryKVCache(shape, options.budget, sequence.max_length)


def _budget(options: TriForceOptions, sequence: Sequence) -> int:
    return min(options.budget, sequence.max_length)


POLICIES: dict[str, Callable[[CacheShape, TriForceOptions, Sequence], DraftCache]] = {
    "retrieval": _retrieval,  # the chunks that the newest query attends to most
    "streaming": _streaming,  # the newest positions
    "h2o": _h2o,  # half the newest, half those that had most attention so far
    "topk": _topk,  # the positions that the newest query attends to most, chosen before every draft
    "summary": _summary,  # the most important chunks, and the others as one slot each
}
"""What the middle level sees of the cache: the first four are those of table 1."""
