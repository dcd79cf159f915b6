"""Published config.json files of Gemma 4, cut down, and models that they describe.

Windows are shorter than texts, and layers without one take other heads of a cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

EVERYWHERE: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": True,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 128,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 128,
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_text",
    "num_attention_heads": 4,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 40,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": "vision",
    "use_cache": True,
    "use_double_wide_mlp": False,
    "vocab_size": 200,
    "vocab_size_per_layer_input": 200,
}
GEMMA4: dict[str, dict[str, Any]] = {
    "Gemma 4 31B": EVERYWHERE | {"expert_intermediate_size": None, "num_experts": None, "top_k_experts": None},
    "Gemma 4 26B A4B": EVERYWHERE
    | {"enable_moe_block": True, "moe_intermediate_size": 48, "num_experts": 8, "top_k_experts": 3},
    "Gemma 4 whose values have a projection": EVERYWHERE | {"attention_k_eq_v": False, "num_key_value_heads": 2},
}
OF_E_MODELS: dict[str, Any] = EVERYWHERE | {
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 8,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 4,
}
GEMMA4 |= {
    "Gemma 4 E2B": OF_E_MODELS | {"use_double_wide_mlp": True},
    "Gemma 4 E4B": OF_E_MODELS | {"num_key_value_heads": 2},
}
GEMMA4["Gemma 4 12B"] = {
    key: value
    for key, value in EVERYWHERE.items()
    if key not in ("enable_moe_block", "hidden_size_per_layer_input", "vocab_size_per_layer_input")
} | {"model_type": "gemma4_unified_text"}
STRIPES = dict.fromkeys(GEMMA4, (4, 2, 4, 2)) | {
    "Gemma 4 whose values have a projection": (2, 4, 2, 4),
    "Gemma 4 E2B": (1, 2, 1, 2),
    "Gemma 4 E4B": (2, 4, 2, 4),
}


def write_gemma4(name: str, folder: Path) -> None:
    """Write a random model as it is published: nested, with a tower beside it."""
    text = GEMMA4[name]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**text))
    numbers = [*model.parameters(), *(each for part, each in model.named_buffers() if part.endswith("layer_scalar"))]
    for each in numbers:
        each.data += 0.15 * torch.randn_like(each)
    model.to(torch.bfloat16).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    tensors = {f"model.language_model.{part.removeprefix('model.')}": each for part, each in stored.items()}
    tensors["model.embed_vision.embedding_projection.weight"] = torch.ones(8, 8)
    for number in range(text["num_hidden_layers"] - text["num_kv_shared_layers"], text["num_hidden_layers"]):
        of_keys = f"model.language_model.layers.{number}.self_attn."  # published, though nothing reads them
        tensors |= {f"{of_keys}{part}.weight": torch.ones(64, 128) for part in ("k_proj", "v_proj")}
        tensors[f"{of_keys}k_norm.weight"] = torch.ones(64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kind = text["model_type"].removesuffix("_text")
    whole = {"model_type": kind, "text_config": text, "eos_token_id": [1, 106], "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(whole))
