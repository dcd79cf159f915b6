"""The trainings that GRIFFIN's tables compare: each once, in a folder of its own, and used again by other tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.papers.griffin.model import GriffinConfig
from swiftbatch.worker.papers.griffin.tables.catalogue import Variant
from swiftbatch.worker.papers.griffin.training.accuracy import GriffinAccuracyRecord
from swiftbatch.worker.papers.griffin.training.recipe import GriffinRecipe
from swiftbatch.worker.papers.griffin.training.training import griffin_folder, train_griffin

FEATURES = "features"  # beside the trainings, which share them


@dataclass(frozen=True)
class Training:
    """A draft model that is there, as one row of a table."""

    row: str
    seed: int
    folder: Path
    recipe: GriffinRecipe
    accuracy: list[GriffinAccuracyRecord]  # after training, for each kind of held-out text; none where there are none


def train_variants(
    rows: dict[str, Variant],
    seeds: range,
    files: ModelFiles,
    data: Path,
    work: Path,
    recipe: GriffinRecipe,
    report: Callable[[str], None],
) -> list[Training]:
    """Train every row's draft model with every seed, where it is not there yet. Raises ModelError, CorpusError."""
    target = AutoConfig.from_pretrained(files.path, local_files_only=True, trust_remote_code=False)
    trainings = []
    for seed in seeds:
        for row, variant in rows.items():
            own = recipe_of(variant, recipe, seed, target)
            folder = work / f"{variant.name}-{seed}"
            report(f"{row}, seed {seed}: training in {folder}")
            train_griffin(files.name, data, folder, own, report, work / FEATURES)
            log = griffin_folder(folder, files.fingerprint, own).records()
            accuracy = [GriffinAccuracyRecord(**record) for record in log if record.get("when") == "after"]
            trainings.append(Training(row, seed, folder, own, accuracy))
    return trainings


def recipe_of(variant: Variant, base: GriffinRecipe, seed: int, target: PreTrainedConfig) -> GriffinRecipe:
    """A variant's recipe, which differs from `base` in what the variant changes and in the seed."""
    sizes = GriffinConfig.for_target(target)
    expansions = {"hidden": sizes.hidden_size, "double": 2 * sizes.intermediate_size}
    changes: dict[str, Any] = dict(variant.changes)
    if variant.expansion is not None:
        changes["expansion_size"] = expansions[variant.expansion]
    return replace(base, seed=seed, **changes)
