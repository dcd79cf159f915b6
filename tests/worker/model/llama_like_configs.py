"""Published config.json files of decoders near Llama."""

from __future__ import annotations

from typing import Any

from tests.worker.model.dense_configs import EVERYWHERE, LLAMA3, PUBLISHED, YARN

LIKE_LLAMA: dict[str, dict[str, Any]] = {
    "Phi-4": EVERYWHERE
    | {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 100257,
        "embd_pdrop": 0.0,
        "eos_token_id": 100265,
        "max_position_embeddings": 16384,
        "model_type": "phi3",
        "original_max_position_embeddings": 16384,
        "pad_token_id": 0,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 250000,
        "sliding_window": None,
        "transformers_version": "4.47.0",
    },
    "Seed-OSS 36B": EVERYWHERE
    | {
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.1,
        "attention_out_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "mlp_bias": False,
        "model_type": "seed_oss",
        "pad_token_id": 1,
        "residual_dropout": 0.1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0,
        "transformers_version": "4.55.0",
    },
}


LIKE_LLAMA |= {
    "GLM-4 9B": EVERYWHERE
    | {
        "architectures": ["GlmForCausalLM"],
        "attention_bias": True,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "model_type": "glm",
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
        "rope_theta": 10000.0,
    },
    "ERNIE 4.5 0.3B": EVERYWHERE
    | {
        "architectures": ["Ernie4_5ForCausalLM"],
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "model_type": "ernie4_5",
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    "Granite 3.3 8B": EVERYWHERE
    | {
        "architectures": ["GraniteForCausalLM"],
        "attention_bias": False,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "logits_scaling": 16.0,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "granite",
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
    },
    "Granite 4.0 micro, whose layers all attend": EVERYWHERE
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12,
        "layer_types": ["attention", "attention"],
        "logits_scaling": 10,
        "mamba_d_conv": 4,
        "mamba_n_heads": 2,
        "mamba_d_state": 8,
        "mamba_expand": 1,
        "max_position_embeddings": 131072,
        "model_type": "granitemoehybrid",
        "num_experts_per_tok": 0,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000000,
        "shared_intermediate_size": 96,
        "tie_word_embeddings": True,
    },
    "SmolLM3 3B": EVERYWHERE
    | {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": False,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "model_type": "smollm3",
        "no_rope_layer_interval": 2,
        "no_rope_layers": [1, 0],
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
}


LIKE_LLAMA["GLM-4 9B above its positions, which scales half of each head"] = LIKE_LLAMA["GLM-4 9B"] | {
    "rope_scaling": YARN
}
WINDOWED = EVERYWHERE | {"rms_norm_eps": 1e-05, "sliding_window": 20}
LIKE_LLAMA |= {
    "CWM": WINDOWED
    | {
        "architectures": ["CwmForCausalLM"],
        "head_dim": 128,
        "layer_types": ["full_attention", "sliding_attention"],
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "cwm",
        "rope_scaling": LLAMA3 | {"factor": 16.0},
        "rope_theta": 1000000.0,
    },
    "Ministral": WINDOWED
    | {
        "architectures": ["MinistralForCausalLM"],
        "head_dim": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 32768,
        "model_type": "ministral",
        "rope_theta": 100000000.0,
    },
    "Mistral 7B v0.1": PUBLISHED["Mistral 7B v0.1"] | {"sliding_window": 20},
    "Phi-3 mini 4K": LIKE_LLAMA["Phi-4"] | {"rope_theta": 10000.0, "sliding_window": 20},
    "Qwen3 with windows": PUBLISHED["Qwen3 8B"]
    | {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
}
