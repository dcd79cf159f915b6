"""Angles that depend on a forward's longest text are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swiftbatch.worker.exactness.forward_comparisons import compare
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import what_refuses
from tests.worker.model.folders import saved_as

ALPHA = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
NOWHERE = Path("nowhere")  # no files beside the config
HUNYUAN: dict[str, Any] = {  # Hunyuan-1.8B-Instruct as published, cut down
    "add_classification_head": False,
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_head_dim": 64,
    "bos_token_id": 1,
    "class_num": 0,
    "dense_list": [128, 0],
    "enable_lm_head_fp32": True,
    "eod_token_id": 2,
    "eos_token_id": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.3,
    "intermediate_size": 96,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "model_type": "hunyuan_v1_dense",
    "norm_type": "rms",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": ALPHA | {"type": "dynamic"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_cla": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
    "vocab_size": 97,
}


EXPERTS = {  # what Hunyuan-A13B adds
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "model_type": "hunyuan_v1_moe",
    "moe_drop_tokens": False,
    "moe_intermediate_size": [96, 96],
    "moe_layer_num_skipped": 0,
    "moe_topk": [2, 2],
    "norm_topk_prob": True,
    "num_experts": 4,
    "num_shared_expert": [1, 1],
    "use_mixed_mlp_moe": True,
}


@pytest.mark.parametrize("others", [{}, EXPERTS], ids=["dense", "experts"])
def test_hunyuan_as_published_says_what_transformers_says(others: dict[str, Any], tmp_path: Path) -> None:
    config = HUNYUAN | others
    assert what_refuses(config, NOWHERE) is None
    found = compare(TargetModel.load(saved_as(config, tmp_path), "float32", "cpu"))
    assert found.agrees, found
    assert found.num_same_choices == found.num_rows


def test_the_alpha_of_hunyuan_changes_its_logits() -> None:
    """So the test above would notice its absence."""
    logits = []
    for alpha in (1000.0, 1.0):
        scaling = HUNYUAN["rope_scaling"] | {"alpha": alpha}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**HUNYUAN | {"rope_scaling": scaling})).eval()
        logits.append(model(input_ids=torch.arange(90)[None]).logits)
    assert (logits[0] - logits[1]).abs().max() > 0.01 * logits[0].std()


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": ALPHA | {"type": "dynamic", "alpha": None}},
        {"model_type": "llama"},  # these angles ignore alpha
    ],
)
def test_dynamic_angles_without_an_alpha_that_counts_are_refused(change: dict[str, Any]) -> None:
    refusal = what_refuses(HUNYUAN | change, NOWHERE)
    assert refusal is not None
    assert "its rotary positions (dynamic) change with the length of the text" in refusal
