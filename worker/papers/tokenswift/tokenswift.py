"""TokenSwift (Wu et al. 2025): heads and reused n-grams propose, the target with a summarised cache checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.caches.full import MAX_TREE_NODES
from swiftbatch.worker.caches.partial import PartialCacheFactory
from swiftbatch.worker.caches.summary import SummaryKVCache
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.drafters.recycling.token_recycling import TokenRecyclingDrafter
from swiftbatch.worker.drafters.two_level.chain import RoundPlan
from swiftbatch.worker.drafters.two_level.drafter import TwoLevelDrafter
from swiftbatch.worker.drafters.two_level.round_plan import planner_of
from swiftbatch.worker.papers.tokenswift.heads import DecodingHeads
from swiftbatch.worker.papers.tokenswift.proposer import TokenSwiftProposer
from swiftbatch.worker.target.step_costs import Costs
from swiftbatch.worker.target.target import TargetModel


@dataclass(frozen=True)
class TokenSwiftOptions:
    """The paper's parameters. Defaults are what is fastest; the paper's own are in `worker/bench/bench_variants.py`."""

    digits: tuple[int, ...] = (1, 3, 3, 3)
    ngram_size: int = 4
    num_ngrams: int = 20  # k
    cache: PartialCacheFactory = SummaryKVCache  # what the rounds see
    budget: int = ENGINES["tokenswift"].partial_budget
    draft_rounds: int | None = None  # K; None: as many as pay
    recycles: bool = True  # also what the target said at the rows it verified (token recycling)


DEFAULTS = TokenSwiftOptions()


def tokenswift(
    target: TargetModel,
    costs: Costs,
    parts_folder: Path | None,
    options: TokenSwiftOptions = DEFAULTS,
    new_proposer: Callable[..., TokenSwiftProposer] = TokenSwiftProposer,
) -> TwoLevelDrafter:
    """A `DrafterFactory`. Raises ModelError where there are no heads for this target, or too few."""
    heads = DecodingHeads.load(parts_folder, target)
    if len(options.digits) > heads.num_heads + 1:
        digits = ",".join(map(str, options.digits))
        folder = parts_folder or target.files.path
        raise ModelError(f"tree {digits}: the heads in {folder} are {heads.num_heads}, for that many digits + 1")
    recycling = TokenRecyclingDrafter(target, None) if options.recycles else None
    proposer = new_proposer(heads, options.digits[1:], options.ngram_size, options.num_ngrams, recycling)
    plan = None if options.draft_rounds is None else whole_trees(options.draft_rounds)
    planner = planner_of(plan, costs, options.budget)
    return TwoLevelDrafter(target, proposer, planner, options.cache, options.budget, options.digits[0])


def whole_trees(num_rounds: int) -> RoundPlan:
    """The paper's plan: whole trees; the first round's forward has one row."""
    return RoundPlan(num_rounds, MAX_TREE_NODES, MAX_TREE_NODES, MAX_TREE_NODES, is_first_bare=True)
