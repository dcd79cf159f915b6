from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from tests.worker.model.expert_configs import write_experts
from tests.worker.model.formats.twins import logits_of
from tests.worker.model.kind_parts import tiny_model
from tests.worker.model.latent_configs import WITH_LATENTS
from tests.worker.model.test_hybrid_configs import PUBLISHED, TEXT, publish

UNFIT = "its config.json and its weights do not belong together"


def published(name: str, folder: Path) -> dict[str, Any]:
    """Return the config of fitting weights."""
    config = WITH_LATENTS[name] if name in WITH_LATENTS else PUBLISHED[name]
    if name in WITH_LATENTS:
        write_experts(config, folder)
    else:
        publish(config, folder)
    return config


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("DeepSeek R1", {"v_head_dim": 64}),
        ("DeepSeek R1", {"qk_nope_head_dim": 64}),
        ("DeepSeek R1", {"moe_intermediate_size": 64}),
        ("DeepSeek R1", {"n_shared_experts": 2}),
        ("Nemotron 3 Nano", {"mamba_num_heads": 2}),
        ("Nemotron 3 Nano", {"ssm_state_size": 64}),
        ("Nemotron 3 Nano", {"moe_shared_expert_intermediate_size": 64}),
        ("Nemotron 3 Super", {"moe_latent_size": 48}),
        ("Falcon-H1", {"mamba_d_state": 64}),
        ("Falcon-H1", {"mamba_n_groups": 3}),
    ],
)
def test_a_size_that_weights_do_not_have_is_told_in_one_line(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = published(name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=UNFIT):
        TargetModel.load(locate_model(str(tmp_path)), "bfloat16", "cpu")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "tensor", "rows"),
    [
        ("Nemotron 3 Nano", "backbone.layers.0.mixer.norm.weight", slice(32)),
        ("Nemotron 3 Nano", "backbone.layers.0.mixer.norm.weight", slice(0)),
        ("Nemotron 3 Nano", "backbone.layers.0.mixer.in_proj.weight", slice(100)),
        ("Nemotron 3 Nano", "backbone.layers.1.mixer.shared_experts.up_proj.weight", (0, 0)),
        ("Qwen3.5", "model.layers.0.linear_attn.norm.weight", slice(1)),
        ("DeepSeek R1", "model.layers.0.self_attn.kv_b_proj.weight", slice(100)),
        ("DeepSeek R1", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", [*range(96), 0]),
    ],
)
def test_a_part_of_a_tensor_is_told_in_one_line(name: str, tensor: str, rows: Any, tmp_path: Path) -> None:
    published(name, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {tensor: tensors[tensor][rows].clone()}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=re.escape(tensor.removeprefix("backbone.").removeprefix("model."))):
        TargetModel.load(locate_model(str(tmp_path)), "bfloat16", "cpu")


def test_layers_of_products_beside_layers_that_attend_need_no_layer_with_a_state(tmp_path: Path) -> None:
    config = PUBLISHED["Nemotron-H"] | {"hybrid_override_pattern": "*-*-*-*-", "head_dim": 64}
    model = publish(config, tmp_path)
    found = logits_of(TargetModel.load(locate_model(str(tmp_path)), "float32", "cpu"), TEXT[:40])
    expected = model(input_ids=torch.tensor([TEXT[:40]])).logits[0]
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()


def test_heads_of_keys_that_do_not_divide_those_of_queries_are_told_in_one_line(tmp_path: Path) -> None:
    config = {key: each for key, each in PUBLISHED["Nemotron-H"].items() if key != "num_key_value_heads"}  # then 8
    (tmp_path / "config.json").write_text(json.dumps(config))
    tiny_model(AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="it has 4 heads of queries for 8 of keys"):
        TargetModel.load(locate_model(str(tmp_path)), "float32", "cpu")
