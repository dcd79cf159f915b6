"""All that belongs to a model's weights, in order: `swiftbatch train all`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from swiftbatch.worker.model.model_files import DRAFT_FOLDER, PARTS_FOLDER
from swiftbatch.worker.papers.griffin.training.feature_texts import FOLDER as FEATURES
from swiftbatch.worker.papers.griffin.training.recipe import GRIFFIN_RECIPE, GriffinRecipe
from swiftbatch.worker.papers.griffin.training.training import train_griffin
from swiftbatch.worker.papers.tokenswift.training import train_heads
from swiftbatch.worker.papers.triforce.recipe import DraftRecipe, draft_recipe
from swiftbatch.worker.papers.triforce.training import train_draft
from swiftbatch.worker.training import defaults
from swiftbatch.worker.training.head_recipe import HeadRecipe
from swiftbatch.worker.training.held_folder import held
from swiftbatch.worker.training.model_card import write_card
from swiftbatch.worker.training.target.recipe import TargetRecipe
from swiftbatch.worker.training.target.training import train_target

EMBEDDED_HEADS = HeadRecipe(num_own_texts=512)


def train_all(
    data: Path,
    output: Path,
    target: TargetRecipe,
    report: Callable[[str], None],
    heads: HeadRecipe = EMBEDDED_HEADS,
    draft: DraftRecipe | None = None,
    griffin: GriffinRecipe = GRIFFIN_RECIPE,
) -> None:
    """Train a target model and every part that engines draft with, and write the card; what is finished stays.

    The folders of all of them are held from the beginning. Raises CorpusError and ModelError as each training does.
    """
    model, parts = str(output), output / PARTS_FOLDER
    with held(output), held(parts), held(parts / DRAFT_FOLDER):
        train_target(data, output, target, report)
        train_heads(model, data, parts, heads, report)
        draft = draft or draft_recipe(defaults.DRAFT_STEPS, defaults.SEED)
        train_draft(model, data, parts / DRAFT_FOLDER, draft, report)
        train_griffin(model, data, parts, griffin, report)
        shutil.rmtree(parts / FEATURES, ignore_errors=True)
        write_card(output)
