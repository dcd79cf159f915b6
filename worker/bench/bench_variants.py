"""The engines that benchmarks compare: the user's, and variants as the papers have them or with a part left out."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path

from swiftbatch.worker.caches.memory.memory_plan import SlotsWanted
from swiftbatch.worker.drafters.catalogue import CHECKPOINT_ENGINES, ENGINES, DrafterFactory
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.drafters.engine_memory import with_tried
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.target.step_costs import Costs
from swiftbatch.worker.target.target import TargetModel

PAPERS = ("static_recycling", "tokenswift.variants", "triforce.variants", "griffin.variants")  # each has a dictionary


def _variants(paper: str) -> dict[str, DrafterFactory]:
    module = importlib.import_module(f"{__package__.rpartition('.')[0]}.papers.{paper}")
    return module.VARIANTS  # type: ignore[no-any-return]


VARIANTS = {name: factory for paper in PAPERS for name, factory in _variants(paper).items()}
BENCH_ENGINES = {name: entry.factory() for name, entry in ENGINES.items()} | VARIANTS
BY_NAME = BENCH_ENGINES | {name: entry.factory() for name, entry in CHECKPOINT_ENGINES.items()}
"""All that can be named; the last ones need a checkpoint, or a part, that not all models have."""


def known_engine(name: str) -> str:
    """Check the name of an engine or a variant that a benchmark may take. Raises ValueError."""
    if name not in BENCH_ENGINES:
        raise ValueError(f"got {name}; expected one of: {', '.join(BENCH_ENGINES)}")
    return name


def bench_slots(
    engines: Iterable[str], longest: int, num_sequences: int = 1, files: ModelFiles | None = None
) -> SlotsWanted:
    """Return the needs of a benchmark: sequences of so many positions at most, and one more slot for probes.

    Partial caches are those of the engine that keeps most; what variants keep beyond that comes from the rest. With
    `files`, there is also room for what `auto` tries of that model.
    """
    entries = [ENGINES[name] for name in engines if name in ENGINES]
    budget, num_best = (
        max((getattr(entry, name) for entry in entries), default=0) for name in ("partial_budget", "scanned_best")
    )
    wanted = SlotsWanted(longest, budget, num_sequences + 1, num_best)
    tried = next((entry.tries for entry in entries if entry.tries is not None), None)
    return wanted if files is None or tried is None else with_tried(wanted, tried, files, None)


def create_bench_drafter(name: str, target: TargetModel, costs: Costs, parts_folder: Path | None = None) -> Drafter:
    """Create a drafter as `create_drafter` does, for variants, too."""
    return BY_NAME[name](target, costs, parts_folder)
