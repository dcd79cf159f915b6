"""Drafters that count what they reuse, while a long text is generated."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from swiftbatch.worker.bench.bench_variants import create_bench_drafter
from swiftbatch.worker.drafters.base import Drafter
from swiftbatch.worker.target.step_costs import Costs
from swiftbatch.worker.target.target import TargetModel

METERED = dict.fromkeys(("tokenswift", "tokenswift-paper"), "papers.tokenswift.tables.reuse")


@dataclass
class ReuseTally:
    """The gain of reused n-grams so far."""

    num_accepted_tokens: int = 0  # that they alone proposed


def metered_drafter(
    engine: str, target: TargetModel, costs: Costs, parts_folder: Path | None
) -> tuple[Drafter, ReuseTally | None]:
    """An engine's drafter, and what its n-grams bring; None for one that reuses none. Raises ModelError."""
    if engine not in METERED:
        return create_bench_drafter(engine, target, costs, parts_folder), None
    module = importlib.import_module(f"swiftbatch.worker.{METERED[engine]}")
    drafter, tally = module.metered_drafter(engine, target, costs, parts_folder)
    return drafter, tally
