"""A published config.json file of MiMo-V2-Flash, cut down, and a model that it describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

MIMO: dict[str, Any] = {  # cut down; its class in transformers would take these layers for others
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 7,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 96,
    "v_head_dim": 64,
    "intermediate_size": 96,
    "vocab_size": 200,
    "max_position_embeddings": 262144,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334,
    "sliding_window": 40,
    "sliding_window_size": 40,
    "attention_chunk_size": 40,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 96,
    "swa_v_head_dim": 64,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
    "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1],
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": None,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "routed_scaling_factor": None,
    "hidden_act": "silu",
    "layernorm_epsilon": 1e-05,
    "attention_dropout": 0.0,
    "attention_bias": False,
    "attention_value_scale": 0.707,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
MIMO_STRIPES = (1, 2, 2, 2, 2, 1, 2)


def write_mimo(folder: Path) -> None:
    """Write a random model with the published names, and a layer that predicts further tokens."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MIMO))
    for each in [*model.parameters(), *(buffer for key, buffer in model.named_buffers() if "correction" in key)]:
        each.data += 0.15 * torch.randn_like(each)
    model.to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    assert "model.layers.1.self_attn.attention_sink_bias" in tensors
    tensors["model.mtp.layers.0.eh_proj.weight"] = torch.ones(8, 8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(MIMO))
