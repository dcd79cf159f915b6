"""The engines that benchmarks compare: the user's, those of the papers, and variants with a part left out."""

from __future__ import annotations

import functools
from pathlib import Path

from swiftbatch.worker.decode_bench import BY_NAME as BY_NAME
from swiftbatch.worker.drafters.catalogue import ENGINES, PAPER_ENGINES, DrafterFactory
from swiftbatch.worker.drafters.choice.choosing_drafter import with_trees
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.drafters.engine_options import RecyclingOptions
from swiftbatch.worker.drafters.static_recycling import StaticTokenRecyclingDrafter
from swiftbatch.worker.drafters.token_recycling import token_recycling
from swiftbatch.worker.forward.step_costs import Costs
from swiftbatch.worker.forward.target_model import TargetModel

STATIC = RecyclingOptions(tree="measured", max_nodes=79, max_depth=5)
VARIANTS: dict[str, DrafterFactory] = {
    "token-recycling-static": lambda target, costs, _: with_trees(StaticTokenRecyclingDrafter(target, STATIC), costs),
    "token-recycling-no-noise": functools.partial(token_recycling, with_noise=False),
}
BENCH_ENGINES: dict[str, DrafterFactory] = {
    name: entry.factory() for name, entry in (ENGINES | PAPER_ENGINES).items()
} | VARIANTS
COMPARED = VARIANTS.keys() | PAPER_ENGINES.keys()  # beside the users' engines
BY_NAME.update(VARIANTS)


def create_bench_drafter(name: str, target: TargetModel, costs: Costs, parts_folder: Path | None = None) -> Drafter:
    """Create a drafter as `create_drafter` does, for variants, too."""
    return BY_NAME[name](target, costs, parts_folder)
