from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from swiftbatch.scheduler.cli import main
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinModel
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import GRIFFIN_FILE
from swiftbatch.worker.training.feature_files import TextFeatures
from swiftbatch.worker.training.recipes import GriffinRecipe, TextRecipe
from swiftbatch.worker.training.train_griffin import FILES, config_of
from swiftbatch.worker.training.training_texts import hidden_states

SENTENCE = "the quick brown fox jumps over the lazy dog. "
TEXTS = TextRecipe(num_book_tokens=150, num_own_texts=4, num_prompt_tokens=16, num_own_tokens=60)
FAST = GriffinRecipe(num_steps=6, single_pass_share=0.0, window_length=48, num_warmup_steps=2, texts=TEXTS)
CPU = torch.device("cpu")

HASS_RECIPE = GriffinRecipe(align_top_k=None, fusion="none", has_token_enhanced_head=False)
"""HASS: the draft model's own features in training, without token alignment and on EAGLE's draft model."""

EAGLE2_RECIPE = replace(HASS_RECIPE, num_passes=1)
"""EAGLE-2: the target's features only."""


def untrained(target: TargetModel, recipe: GriffinRecipe = FAST) -> GriffinModel:
    torch.manual_seed(0)
    model = GriffinModel(config_of(recipe, target.model.config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)  # for distinct heads and visible attention
    return model


def text(target: TargetModel, num_tokens: int, first_row: int = 0, seed: int = 0, name: str = "books") -> TextFeatures:
    token_ids = torch.randint(250, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    hidden = hidden_states(target, token_ids.tolist()).clone()
    return TextFeatures(name, first_row, token_ids.to(torch.uint32), hidden)


def records(output: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (output / FILES.log).read_text(encoding="utf-8").splitlines()]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / GRIFFIN_FILE)


def silent(line: str) -> None:
    pass


def command(model: Path, data: Path, output: Path, *options: str) -> Result:
    args = ["--model", str(model), "--data", str(data), "--output", str(output), "--steps", "2", *options]
    return CliRunner().invoke(main, ["train", "griffin", *args])


# features
