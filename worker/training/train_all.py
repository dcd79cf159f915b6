"""All trainings of a model's weights, in order: `swiftbatch train all`."""

from __future__ import annotations

import shutil
from pathlib import Path

from swiftbatch.worker.model.model_files import DRAFT_FOLDER, PARTS_FOLDER
from swiftbatch.worker.training.data_parallel import Report
from swiftbatch.worker.training.feature_files import FOLDER as FEATURES
from swiftbatch.worker.training.model_card import write_card
from swiftbatch.worker.training.recipes import GRIFFIN_RECIPE, DraftRecipe, GriffinRecipe, HeadRecipe
from swiftbatch.worker.training.target_recipe import TargetRecipe
from swiftbatch.worker.training.train_draft import train_draft
from swiftbatch.worker.training.train_griffin import train_griffin
from swiftbatch.worker.training.train_target import train_target
from swiftbatch.worker.training.train_tokenswift import FOLDER as HEAD_FEATURES
from swiftbatch.worker.training.train_tokenswift import train_heads
from swiftbatch.worker.training.training_folder import held

EMBEDDED_HEADS, DRAFT_RECIPE = HeadRecipe(num_own_texts=512), DraftRecipe()


def train_all(
    data: Path,
    output: Path,
    target: TargetRecipe,
    report: Report,
    heads: HeadRecipe = EMBEDDED_HEADS,
    draft: DraftRecipe = DRAFT_RECIPE,
    griffin: GriffinRecipe = GRIFFIN_RECIPE,
) -> None:
    """Train a target model and all its drafting parts, and write the model card. Finished parts are kept.

    Raises CorpusError and ModelError.
    """
    model, parts = str(output), output / PARTS_FOLDER
    with held(output), held(parts), held(parts / DRAFT_FOLDER):
        train_target(data, output, target, report)
        train_heads(model, data, parts, heads, report)
        train_draft(model, data, parts / DRAFT_FOLDER, draft, report)
        train_griffin(model, data, parts, griffin, report)
        for folder in (parts / HEAD_FEATURES, parts / DRAFT_FOLDER / FEATURES, parts / FEATURES):
            shutil.rmtree(folder, ignore_errors=True)
        write_card(output)
