"""Weights that are not finite are refused by name, though logits may be finite."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.model.causal_lm import load_causal_lm
from swiftbatch.worker.model.digests import weight_files
from swiftbatch.worker.model.model_files import locate_model
from tests.worker.model.formats.twins import load
from tests.worker.model.kind_parts import save_tiny, tiny_config

CLAMPED = {  # tensors in front of limits
    "gpt_oss": "experts.gate_up_proj",
    "deepseek_v4": "experts.0.w3.weight",
    "minimax_m3_vl_text": "mlp.up_proj.weight",
}


def spoiled(folder: Path, end: str, spoil: Callable[[torch.Tensor], object]) -> str:
    """Change the last tensor with this end of its name, and return the name."""
    [*_, (file, name)] = [
        (file, name) for file in weight_files(folder) for name in sorted(load_file(file)) if name.endswith(end)
    ]
    tensors = load_file(file)
    spoil(tensors[name].view(-1))
    save_file(tensors, file, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize("number", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("kind", CLAMPED)
def test_a_number_that_a_limit_hides_is_refused(kind: str, number: float, tmp_path: Path) -> None:
    save_tiny(tiny_config(kind, has_wide_heads=True), tmp_path)
    load(tmp_path, "bfloat16")
    spoiled(tmp_path, CLAMPED[kind], lambda tensor: tensor[-1:].fill_(number))
    refusal = rf"has numbers in model\.layers\..*{re.escape(CLAMPED[kind])} that are not finite: it is damaged; copy it"
    with pytest.raises(ModelError, match=refusal):
        load(tmp_path, "bfloat16")


def test_layers_of_transformers_refuse_it_too(tmp_path: Path) -> None:
    save_tiny(tiny_config("llama"), tmp_path)
    name = spoiled(tmp_path, "up_proj.weight", lambda tensor: tensor[:1].fill_(-math.inf))
    with pytest.raises(ModelError, match=f"has numbers in {name} that are not finite"):
        load_causal_lm(locate_model(str(tmp_path)), torch.float32)
