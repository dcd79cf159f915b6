"""The published config.json of MiniMax M3, cut down, and random models of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swiftbatch.worker.model import causal_lm  # registers the names of tensors
from swiftbatch.worker.model.text_config import text_view

assert causal_lm
IS_SPARSE = [0, 0, 1, 1, 1]
PUBLISHED: dict[str, Any] = {
    "architectures": ["MiniMaxM3ForCausalLM"],
    "attention_output_gate": False,
    "dense_intermediate_size": 160,
    "first_k_dense_replace": 1,
    "head_dim": 64,
    "hidden_act": "swigluoai",
    "hidden_size": 128,
    "intermediate_size": 48,
    "max_position_embeddings": 1048576,
    "model_type": "minimax_m3",
    "moe_intermediate_size": 48,
    "moe_layer_freq": [0, 1, 1, 1, 1],
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_mtp_modules": 7,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "qk_norm_type": "per_head",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 32,
    "routed_scaling_factor": 2.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 48,
    "sparse_attention_config": {
        "sparse_attention_freq": IS_SPARSE,
        "sparse_block_size": 64,
        "sparse_disable_index_value": IS_SPARSE,
        "sparse_index_dim": 64,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_num_index_heads": 2,
        "sparse_score_type": "max",
        "sparse_topk_blocks": 3,
        "use_sparse_attention": True,
    },
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200,
}
AS_ITS_CLASS_READS = {  # of a smaller one, beside the sizes of all kinds
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "index_n_heads": 2,
    "index_head_dim": 64,
    "index_block_size": 64,
    "index_topk_blocks": 3,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 48,
    "rotary_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}


def smaller(num_blocks: int, size: int = 64) -> dict[str, Any]:
    """Return the config of three layers, whose rows choose `num_blocks` blocks of `size` keys in two."""
    is_sparse = [0, 1, 1]
    own = {
        "sparse_attention_freq": is_sparse,
        "sparse_disable_index_value": is_sparse,
        "sparse_topk_blocks": num_blocks,
    }
    choice = PUBLISHED["sparse_attention_config"] | own
    layers = {"num_hidden_layers": 3, "moe_layer_freq": [0, 0, 1], "first_k_dense_replace": 2}
    return PUBLISHED | layers | {"sparse_attention_config": choice}


def write_m3(folder: Path, published: dict[str, Any] = PUBLISHED) -> Path:
    """Write a random model with the published names."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**text_view(published)))
    for each in [*model.parameters(), *(buffer for key, buffer in model.named_buffers() if "correction" in key)]:
        each.data += 0.15 * torch.randn_like(each)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(published))
    return folder
