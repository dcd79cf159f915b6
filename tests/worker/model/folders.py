from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swiftbatch.worker.model.digests import digests_of
from swiftbatch.worker.model.model_files import ModelFiles


def saved_as(config: dict[str, Any], folder: Path) -> ModelFiles:
    """Save a random model beside its unchanged published config."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**copy.deepcopy(config))
    )  # a copy, because it changes its argument
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return ModelFiles("some-model", folder, digests_of(folder), config["max_position_embeddings"], config["vocab_size"])
