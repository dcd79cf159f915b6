"""The config.json files that models with experts are published with; widths, layers and vocabularies are cut down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 64,
}
CORRECTED = SMALL | {
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 3,
    "rope_scaling": None,
    "routed_scaling_factor": 2.5,
}
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen3 30B A3B": SMALL
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "intermediate_size": 96,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "Qwen1.5 MoE A2.7B": SMALL
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "intermediate_size": 96,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "mlp_only_layers": [0],  # as other models of its kind have it
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 48,
        "norm_topk_prob": False,
        "num_experts": 6,
        "num_experts_per_tok": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 112,
        "sliding_window": 32768,
        "use_sliding_window": False,
    },
    "Mixtral 8x7B": SMALL
    | {
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": 96,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    "OLMoE 1B 7B": SMALL
    | {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "clip_qkv": None,
        "intermediate_size": 48,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
    },
    "Granite 3.1 1B A400M": SMALL
    | {
        "architectures": ["GraniteMoeForCausalLM"],
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "intermediate_size": 48,
        "logits_scaling": 6.0,
        "max_position_embeddings": 131072,
        "model_type": "granitemoe",
        "num_experts_per_tok": 3,
        "num_local_experts": 8,
        "output_router_logits": False,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1500000,
        "router_aux_loss_coef": 0.0,
        "tie_word_embeddings": True,
    },
    "gpt-oss 120B": SMALL
    | {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "initial_context_length": 4096,
        "intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_experts_per_tok": 4,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 20,
        "swiglu_limit": 7.0,
    },
    "GLM 4.5": CORRECTED
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "max_position_embeddings": 131072,
        "model_type": "glm4_moe",
        "n_group": 1,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000,
        "topk_group": 1,
        "use_qk_norm": True,
    },
    "ERNIE 4.5 21B A3B": SMALL
    | {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "intermediate_size": 96,
        "max_position_embeddings": 131072,
        "model_type": "ernie4_5_moe",
        "moe_capacity": [64, 64, 64],
        "moe_gate": "topk",
        "moe_intermediate_size": 48,
        "moe_k": 3,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": 8,
        "moe_num_shared_experts": 2,
        "moe_use_aux_free": True,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    "MiniMax M2": {key: value for key, value in SMALL.items() if key not in ("attention_dropout", "initializer_range")}
    | {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "head_dim": 128,
        "intermediate_size": 48,
        "max_position_embeddings": 196608,
        "model_type": "minimax_m2",
        "mtp_transformer_layers": 1,
        "num_experts_per_tok": 3,
        "num_local_experts": 8,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    "dots.llm1": CORRECTED
    | {
        "architectures": ["Dots1ForCausalLM"],
        "attention_bias": False,
        "max_position_embeddings": 32768,
        "max_window_layers": 62,
        "model_type": "dots1",
        "n_group": 4,  # as models of DeepSeek's have groups
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000000,
        "scoring_func": "noaux_tc",
        "sliding_window": None,
        "topk_group": 2,
        "topk_method": "noaux_tc",
    },
}


def write_experts(published: dict[str, Any], folder: Path) -> None:
    """A tiny model with random weights of a spread that routes rows to different experts."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**published))
    for each in [*model.parameters(), *(buffer for key, buffer in model.named_buffers() if "correction" in key)]:
        each.data += 0.15 * torch.randn_like(each)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(published))
