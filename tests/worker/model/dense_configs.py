"""Published config.json files of Llama, Mistral, Qwen and MiMo, and keys that tools add.

Sizes are cut down, with windows shorter than texts.
"""

from __future__ import annotations

from typing import Any

LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
SMALL = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "vocab_size": 64}
EVERYWHERE = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    **SMALL,
}
LLAMA = EVERYWHERE | {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "transformers_version": "4.42.3",
}
QWEN25 = EVERYWHERE | {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "transformers_version": "4.43.1",
    "use_sliding_window": False,
}
MISTRAL = EVERYWHERE | {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "rms_norm_eps": 1e-05,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B Instruct": LLAMA | {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "Llama 3.2 1B": LLAMA
    | {"head_dim": 64, "tie_word_embeddings": True, "rope_scaling": LLAMA3 | {"factor": 32.0}, "rope_theta": 500000.0},
    "Llama 3.1 as newer versions save it": LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
    "Mistral 7B v0.3": MISTRAL
    | {"rope_theta": 1000000.0, "sliding_window": None, "transformers_version": "4.42.0.dev0"},
    "Mistral 7B v0.1": MISTRAL | {"rope_theta": 10000.0, "sliding_window": 40, "transformers_version": "4.34.0.dev0"},
    "Qwen2.5 7B Instruct": QWEN25,
    "Qwen2 with windows from a layer on": QWEN25
    | {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "Qwen2 with windows as newer versions save them": QWEN25
    | {
        "use_sliding_window": True,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Qwen2.5 7B": QWEN25 | {"eos_token_id": 151643, "max_position_embeddings": 131072, "use_mrope": False},
    "Qwen2.5 7B Instruct above 32,768 positions": QWEN25 | {"rope_scaling": YARN},
    "MiMo 7B, which is Qwen2 with a layer more": QWEN25
    | {
        "architectures": ["MiMoForCausalLM"],
        "attention_bias": True,
        "head_dim": 64,
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
        "rope_theta": 640000,
        "use_mrope": False,
    },
    "Llama 3.1 8B with words of tools": LLAMA
    | {
        "_attn_implementation": "flash_attention_2",
        "auto_map": {"AutoConfig": "configuration.Config"},
        "rope_scaling": LLAMA3,
        "rope_theta": 500000.0,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "transformers.js_config": {"dtype": {"model": "q4"}},
        "unsloth_fixed": True,
        "task_specific_params": None,
        "temperature": 1.0,
        "top_k": 50,
    },
    "Qwen3 8B": EVERYWHERE
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "transformers_version": "4.51.0",
        "use_sliding_window": False,
    },
}
