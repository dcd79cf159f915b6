"""Quantized experts in transformers' layers have their twins' bits."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.worker.model.formats.examples import EXAMPLES, Example, e4m3, fp8, numbers_of, random_e4m3, random_scales
from tests.worker.model.formats.twins import load, logits_of, make_twins, write_mxfp4, written
from tests.worker.model.kind_parts import tiny_config, tiny_model

pytestmark = pytest.mark.long


def saved(kind: str, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tiny_model(tiny_config(kind)).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("example", [fp8([128, 128]), EXAMPLES["compressed-tensors NVFP4"]], ids=["FP8", "NVFP4"])
def test_experts_of_qwen3_in_matrices_of_their_own(example: Example, tmp_path: Path) -> None:
    config, tensors = saved("qwen3_moe", tmp_path / "plain")
    assert any(".experts.3.down_proj." in name for name in tensors)
    packed, dense = make_twins(example, tmp_path, config, tensors)
    for dtype in ("bfloat16", "float32"):
        assert torch.equal(logits_of(load(packed, dtype)), logits_of(load(dense, dtype)))


def test_experts_of_gpt_oss_are_those_that_transformers_makes_of_them(tmp_path: Path) -> None:
    packed, dense = write_mxfp4(tmp_path, *saved("gpt_oss", tmp_path / "plain"))
    for dtype in ("bfloat16", "float32"):
        assert torch.equal(logits_of(load(packed, dtype)), logits_of(load(dense, dtype)))


def test_experts_in_one_tensor_have_the_blocks_of_each(tmp_path: Path) -> None:
    """Newer versions of transformers store all experts in one tensor with scales."""
    config, tensors = saved("glm4_moe", tmp_path / "plain")
    numbers, packed, dense = torch.Generator().manual_seed(5), dict(tensors), dict(tensors)
    found = sorted({name.rpartition(".experts.")[0] for name in tensors if ".experts." in name})
    assert found
    for layer in found:
        for part, (rows, columns) in {"gate_up_proj": (96, 64), "down_proj": (64, 48)}.items():
            codes = random_e4m3((4, rows, columns), numbers)
            scales = random_scales((4, -(-rows // 40), -(-columns // 24)), 2e-3, numbers, torch.float32)
            name = f"{layer}.experts.{part}"
            packed |= {name: codes, f"{name}_scale_inv": scales}
            stored, grid = codes.view(torch.uint8), scales.numpy()

            def value(e: int, r: int, c: int, stored: Tensor = stored, grid: Any = grid) -> Any:
                return e4m3(int(stored[e, r, c])) * grid[e, r // 40, c // 24]

            experts = [numbers_of(functools.partial(value, expert), rows, columns) for expert in range(4)]
            dense[name] = torch.stack(experts)
    for each in (packed, dense):
        for name in [name for name in each if ".experts." in name and name.endswith(".weight")]:
            del each[name]
    said = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [40, 24]}}
    written(tmp_path / "packed", config | said, packed)
    written(tmp_path / "dense", config, dense)
    assert torch.equal(logits_of(load(tmp_path / "packed", "float32")), logits_of(load(tmp_path / "dense", "float32")))
