"""Quantized experts in our kernels have their twins' bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.quantized_weights import Linear, PackedLinear
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.model_files import locate_model
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.model.expert_configs import WITH_EXPERTS
from tests.worker.model.formats.examples import EXAMPLES, Example, fp8
from tests.worker.model.formats.twins import load, logits_of, make_twins, write_mxfp4, written
from tests.worker.model.latent_configs import WITH_INDEXERS, WITH_LATENTS
from tests.worker.model.test_dense_loading import saved

pytestmark = [pytest.mark.long, needs_kernels]

OWN_TEXT = [7 * each % 64 for each in range(18)]


def stored(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = (WITH_EXPERTS | WITH_LATENTS | WITH_INDEXERS)[name]
    saved(folder, AutoConfig.for_model(**config))
    return config, load_file(folder / "model.safetensors")


def native(folder: Path, dtype: str) -> TargetModel:
    target = load(folder, dtype)
    assert isinstance(target.forwards, NativeForwards)
    return target


def num_packed(folder: Path) -> int:
    weights = dense_weights(locate_model(str(folder)), torch.bfloat16)
    assert weights is not None
    found = [layer.experts for layer in weights.layers if layer.experts is not None]
    matrices = [each for experts in found for linears in experts.linears().values() for each in linears]
    return sum(isinstance(each, PackedLinear) for each in matrices)


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(fp8([128, 128]), id="FP8"),
        pytest.param(EXAMPLES["compressed-tensors NVFP4"], id="NVFP4", marks=pytest.mark.slow),
    ],
)
def test_experts_of_qwen3_in_matrices_of_their_own(example: Example, tmp_path: Path) -> None:
    packed, dense = make_twins(example, tmp_path, *stored("Qwen3 30B A3B", tmp_path / "plain"))
    assert num_packed(packed) == 2 * 8 * 3
    for dtype in ("bfloat16", "float32"):
        assert torch.equal(logits_of(native(packed, dtype), OWN_TEXT), logits_of(native(dense, dtype), OWN_TEXT))


def test_latent_attention_of_deepseek_in_blocks_of_fp8(tmp_path: Path) -> None:
    packed, dense = make_twins(fp8([128, 128]), tmp_path, *stored("DeepSeek R1", tmp_path / "plain"))
    assert num_packed(packed) == 8 * 3, "those of its second layer"
    for dtype in ("bfloat16", "float32"):
        assert torch.equal(logits_of(native(packed, dtype), OWN_TEXT), logits_of(native(dense, dtype), OWN_TEXT))


@pytest.mark.parametrize(
    ("name", "example"),
    [
        pytest.param("DeepSeek V3.2", fp8([128, 128]), id="DeepSeek V3.2 in FP8"),
        pytest.param("GLM 5.2", fp8([128, 128]), id="GLM 5.2 in FP8", marks=pytest.mark.slow),
        pytest.param("GLM 5.2", EXAMPLES["ModelOpt NVFP4"], id="GLM 5.2 in NVFP4"),
    ],
)
def test_packed_indexers_choose_the_keys_of_their_twins(name: str, example: Example, tmp_path: Path) -> None:
    packed, dense = make_twins(example, tmp_path, *stored(name, tmp_path / "plain"))
    weights = dense_weights(locate_model(str(packed)), torch.bfloat16)
    assert weights is not None
    first = weights.layers[0]
    assert [type(each) for each in (first.index_query, first.index_key)] == [PackedLinear] * 2
    assert isinstance(first.index_weight, Linear)
    text = [11 * each % 64 for each in range(70)]
    for dtype in ("bfloat16", "float32"):
        assert torch.equal(logits_of(native(packed, dtype), text), logits_of(native(dense, dtype), text))


def write_gpt_oss(folder: Path) -> tuple[Path, Path]:
    return write_mxfp4(folder, *stored("gpt-oss 120B", folder / "plain"))


def test_experts_of_gpt_oss_in_one_tensor_of_mxfp4(tmp_path: Path) -> None:
    packed, dense = write_gpt_oss(tmp_path)
    assert num_packed(packed) == 2 * 8 * 3
    for dtype in ("bfloat16", "float32"):
        assert torch.equal(logits_of(native(packed, dtype), OWN_TEXT), logits_of(native(dense, dtype), OWN_TEXT))


@pytest.mark.parametrize("is_transposed", [True, False], ids=["as published", "as newer versions write it"])
def test_experts_of_qwen3_vl_in_one_tensor_are_those_in_matrices_of_their_own(
    is_transposed: bool, tmp_path: Path
) -> None:
    config, tensors = stored("Qwen3 30B A3B", tmp_path / "plain")
    fused = {name: each for name, each in tensors.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        gates, ups, downs = (
            torch.stack([tensors[f"{prefix}{each}.{role}_proj.weight"] for each in range(8)])
            for role in ("gate", "up", "down")
        )
        both = {"gate_up": torch.cat((gates, ups), dim=1), "down": downs}
        fused |= {
            f"{prefix}{part}_proj": (each.transpose(1, 2) if is_transposed else each).contiguous()
            for part, each in both.items()
        }
    written(tmp_path / "fused", config, fused)
    written(tmp_path / "plain", config, tensors)
    found, expected = (logits_of(native(tmp_path / each, "bfloat16"), OWN_TEXT) for each in ("fused", "plain"))
    assert torch.equal(found, expected)
