"""The engines that benchmarks compare: the user's, and variants as the papers have them or with a part left out."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from swiftbatch.worker.bench.caches.importance import ImportanceKVCache
from swiftbatch.worker.bench.caches.retrieval import RetrievalKVCache
from swiftbatch.worker.caches.memory.plan import SlotsWanted
from swiftbatch.worker.drafters.base import Drafter
from swiftbatch.worker.drafters.catalogue import ENGINES, DrafterFactory
from swiftbatch.worker.drafters.griffin.griffin import GriffinOptions, griffin
from swiftbatch.worker.drafters.recycling.static_recycling import StaticTokenRecyclingDrafter
from swiftbatch.worker.drafters.recycling.token_recycling import TokenRecyclingDrafter
from swiftbatch.worker.drafters.tokenswift.tokenswift import TokenSwiftOptions, tokenswift
from swiftbatch.worker.drafters.triforce.triforce import TriForceOptions, triforce
from swiftbatch.worker.target.step_costs import Costs
from swiftbatch.worker.target.target import TargetModel

TOKENSWIFT_PAPER = TokenSwiftOptions(cache=ImportanceKVCache, budget=4096, draft_rounds=1, recycles=False)
TRIFORCE_PAPER = TriForceOptions(cache=RetrievalKVCache, budget=4096, gammas=(2, 6))
GRIFFIN_PAPER = GriffinOptions(is_full=True)

VARIANTS: dict[str, DrafterFactory] = {
    "token-recycling-static": StaticTokenRecyclingDrafter,
    "token-recycling-static-80": lambda target, *_: StaticTokenRecyclingDrafter(target, None),
    "token-recycling-no-noise": functools.partial(TokenRecyclingDrafter, with_noise=False),
    "tokenswift-paper": functools.partial(tokenswift, options=TOKENSWIFT_PAPER),
    "triforce-paper": functools.partial(triforce, options=TRIFORCE_PAPER),
    "griffin-paper": functools.partial(griffin, options=GRIFFIN_PAPER),
}
BENCH_ENGINES = {name: entry.factory() for name, entry in ENGINES.items()} | VARIANTS


def bench_slots(engines: Iterable[str], longest: int, num_sequences: int = 1) -> SlotsWanted:
    """What a GPU is shared out for: sequences of so many positions at most, and one more slot for probes.

    Partial caches are those of the engine that keeps most; what variants keep beyond that comes from the rest.
    """
    entries = [ENGINES[name] for name in engines if name in ENGINES]
    budget, num_best = (
        max((getattr(entry, name) for entry in entries), default=0) for name in ("partial_budget", "scanned_best")
    )
    return SlotsWanted(longest, budget, num_sequences + 1, num_best)


def create_bench_drafter(name: str, target: TargetModel, costs: Costs, parts_folder: Path | None = None) -> Drafter:
    """As `create_drafter`, for variants, too."""
    return BENCH_ENGINES[name](target, costs, parts_folder)
