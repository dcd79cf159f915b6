"""Published config.json files with latent attention, cut down."""

from __future__ import annotations

from typing import Any

from tests.worker.model.routed_expert_configs import SMALL

LATENT = SMALL | {
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "intermediate_size": 96,
    "kv_lora_rank": 64,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 3,
    "num_key_value_heads": 2,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "topk_method": "noaux_tc",
    "v_head_dim": 48,
}
STRETCHED = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
WITH_LATENTS: dict[str, dict[str, Any]] = {
    "DeepSeek R1": LATENT
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "ep_size": 1,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_layer_freq": 1,
        "n_group": 4,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": STRETCHED | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 2,
    },
    "DeepSeek V2 Lite": LATENT
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v2",
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "pretraining_tp": 1,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-06,
        "rope_scaling": STRETCHED | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "topk_group": 1,
        "topk_method": "greedy",
    },
    "DeepSeek V2": LATENT
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v2",
        "moe_layer_freq": 1,
        "n_group": 4,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": STRETCHED | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "rope_theta": 10000,
        "routed_scaling_factor": 16.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
    },
    "GLM 4.7 Flash": LATENT
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "hidden_size": 320,
        "max_position_embeddings": 202752,
        "model_type": "glm4_moe_lite",
        "n_group": 1,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
    },
}
