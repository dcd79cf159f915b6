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
INDEXED = LATENT | {  # most keys of a text of some dozens of tokens are not chosen
    "ep_size": 1,
    "index_head_dim": 48,
    "index_n_heads": 32,  # with few heads scores of 0 tie, and topk of torch chooses any of them
    "index_topk": 20,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
}
OF_GLM = INDEXED | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "dtype": "bfloat16",
    "indexer_rope_interleave": True,
    "model_type": "glm_moe_dsa",
    "n_group": 1,
    "pretraining_tp": 1,
    "qk_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "topk_group": 1,
}
WITH_INDEXERS: dict[str, dict[str, Any]] = {
    "DeepSeek V3.2": INDEXED
    | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v32",
        "n_group": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": STRETCHED | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "rope_theta": 10000,
        "topk_group": 2,
    },
    "GLM 5": OF_GLM
    | {
        "head_dim": 32,
        "max_position_embeddings": 202752,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    },
    "GLM 5.2": OF_GLM
    | {
        "head_dim": 192,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": 3,
        "index_topk_freq": 4,
        "index_topk_pattern": None,
        "indexer_types": ["full", "shared", "full", "shared", "shared"],
        "max_position_embeddings": 1048576,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"],
        "moe_router_dtype": "float32",
        "num_hidden_layers": 5,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    },
}
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
