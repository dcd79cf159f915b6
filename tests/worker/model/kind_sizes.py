"""Sizes of tiny models of every kind."""

from __future__ import annotations

from typing import Any

from swiftbatch.worker.model.architectures.catalogue import ARCHITECTURES
from tests.worker.model.minimax_config import AS_ITS_CLASS_READS

WITH_STATES = {kind: spec.mixer.words for kind, spec in ARCHITECTURES.items() if spec.mixer}
VOCAB_SIZE = 97
NUM_POSITIONS = 1024
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": NUM_POSITIONS,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
INDEXED = LATENT | {
    "qk_nope_head_dim": 48,
    "index_topk": 40,
    "index_n_heads": 32,
    "index_head_dim": 32,
    "pad_token_id": None,  # its embedding is zero, and so are all scores of its rows
    **dict.fromkeys(("sliding_window", "attention_chunk_size")),
}
FOUR = {"num_hidden_layers": 4}  # three forms; or only the last differs; or experts would hide their sinks
THREE = {"num_hidden_layers": 3}  # two with states, then one that attends and keeps their errors
RECURRENT = THREE | {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 48,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": "auto",
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
CONVOLUTIONS = {  # by number of layers
    number: {"num_hidden_layers": number, "layer_types": types, "conv_L_cache": 3, "conv_bias": False}
    for number, types in ((3, ["conv", "conv", "full_attention"]), (4, ["conv", "full_attention"] * 2))
}
LAST_WINDOWED = {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}
WINDOWS = ["sliding_attention", "full_attention"]
HALF_TURNED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
ONE_WINDOWED = {"layer_types": WINDOWS, "attention_chunk_size": None}
OF_GEMMA4 = ONE_WINDOWED | {"attention_k_eq_v": True, "final_logit_softcapping": 30.0}
OWN_THETAS = FOUR | {
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "layer_rope_theta": [10000.0, 0.0, 5e5, 1e4],
}


def nas_blocks(*layers: tuple[int | None, float | None]) -> list[dict[str, Any]]:
    """Return the published blocks of layers, each of a group of heads and a factor of the MLP's width, or null."""
    attention = {"num_sink_tokens": None, "replace_with_linear": False, "sparsify": None, "unshifted_sink": False}
    attention |= {"use_prefill_window_in_sink_attention": False, "window_length": None}
    return [
        {
            "attention": attention | {"n_heads_in_group": group, "no_op": group is None},
            "ffn": {"ffn_mult": mult, "no_op": mult is None, "replace_with_linear": False, "sparsify": None},
        }
        for group, mult in layers
    ]


OWN_SIZES: dict[str, dict[str, Any]] = {
    "afmoe": FOUR | {"mup_enabled": True, "num_dense_layers": 1, "num_shared_experts": 1},
    **dict.fromkeys(("cohere2", "exaone4", "exaone_moe", "gpt_oss", "llama4_text", "olmo3"), FOUR),
    "cohere2_moe": {
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "expert_selection_fn": "sigmoid",
        "shared_expert_combination_strategy": "sum",
    },
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
    "deepseek_v3": LATENT,
    "deepseek_v32": INDEXED,
    "deepseek_v4": FOUR
    | {
        "num_key_value_heads": 1,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "compress_ratios": [0, 4, 128, 4],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "num_hash_layers": 1,
        "index_topk": 24,
        "index_n_heads": 32,
        "index_head_dim": 32,
        "attention_chunk_size": None,
        "pad_token_id": None,  # as with others that have indexers
        "o_groups": 2,
        "o_lora_rank": 32,
        "swiglu_limit": 1.0,  # many numbers exceed it
    },
    "glm_moe_dsa": INDEXED | FOUR | {"indexer_types": ["full", "full", "shared", "shared"]},
    "glm4_moe_lite": LATENT,
    "kimi_linear": {
        **LATENT,
        **FOUR,
        "q_lora_rank": None,
        "n_group": 1,
        "linear_attn_config": {
            "full_attn_layers": [2, 4],
            "kda_layers": [1, 3],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
    "dots1": {"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "gemma4_text": OF_GEMMA4 | {"enable_moe_block": True, "hidden_size_per_layer_input": 0, "top_k_experts": 2},
    "gemma4_unified_text": OF_GEMMA4,
    "granite": {"attention_multiplier": 0.125},  # at 1 a score's last bit decides what a row sees
    "granite_swa": OWN_THETAS,
    "granitemoe_swa": {**OWN_THETAS, "shared_intermediate_size": 48},
    "granitemoeshared": {"shared_intermediate_size": 48},
    "hunyuan_v1_moe": {"moe_topk": [1, 2]},
    "laguna": {
        **FOUR,
        "layer_types": WINDOWS * 2,
        "num_attention_heads_per_layer": [4, 8, 4, 8],
        "shared_expert_intermediate_size": 48,
    },
    "mellum": {"layer_types": WINDOWS},
    "mimo_v2_flash": FOUR
    | {"layer_types": WINDOWS * 2, "v_head_dim": 48, "rope_parameters": dict.fromkeys(WINDOWS, HALF_TURNED)},
    "minimax_m3_vl_text": AS_ITS_CLASS_READS,
    "helium": {"head_dim": 16},  # its heads together are as wide as a row
    "olmoe": {"hidden_size": 128},  # its norms span all heads
    "smollm3": FOUR | {"sliding_window": None},
    "qwen2": LAST_WINDOWED,
    "qwen3": LAST_WINDOWED,
    **{kind: RECURRENT for kind, form in WITH_STATES.items() if form == "gated delta nets"},
    "bamba": {**MAMBA, **THREE, "attn_layer_indices": [2]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 192, "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 0.7]},
    "granitemoehybrid": {
        **MAMBA,
        **THREE,
        "layer_types": ["mamba", "mamba", "attention"],
        "shared_intermediate_size": 96,
    },
    "lfm2": CONVOLUTIONS[3] | {"block_ff_dim": 96, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": CONVOLUTIONS[4] | {"num_dense_layers": 1, "routed_scaling_factor": 1.0},
    "nemotron-nas": {
        "num_hidden_layers": 5,
        "block_configs": nas_blocks((2, 5), (2, 2.5), (None, 6.5), (None, None), (2, None)),
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*E-M*",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "moe_shared_expert_intermediate_size": 48,
        "layer_norm_epsilon": 1e-5,
        "sliding_window": None,
    },
}
