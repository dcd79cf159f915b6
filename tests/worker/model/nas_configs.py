"""Published config.json files of Llama-Nemotron's NAS models, with sizes cut down, and random weights for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.worker.model.kind_sizes import nas_blocks

HIDDEN, VOCAB, WIDEST = 128, 64, 512
WIDTHS = {1.0: 256, 3.0: 256, 5.25: 512}  # of MLPs by `ffn_mult`, as the published code rounds
SUPER: dict[str, Any] = {
    "_name_or_path": "llama_nemotron_super",
    "architectures": ["DeciLMForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_decilm.DeciLMConfig",
        "AutoModelForCausalLM": "modeling_decilm.DeciLMForCausalLM",
    },
    "block_configs": nas_blocks((2, 3.0), (2, 5.25), (None, 3.0), (None, 1.0), (2, 5.25)),
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": None,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "nemotron-nas",
    "num_attention_heads": 2,
    "num_hidden_layers": 5,
    "num_key_value_heads": None,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.48.3",
    "use_cache": True,
    "vocab_size": VOCAB,
}
PUBLISHED = {
    "Super 49B": SUPER,
    # a row of layers of the published one has no parts
    "Ultra 253B": SUPER | {"block_configs": nas_blocks((2, 5.25), (None, 3.0), (None, None), (None, None), (2, 1.0))},
    "one that may come": SUPER
    | {"block_configs": nas_blocks((None, None), (2, None), (None, 1.0), (2, None), (2, 3.0))},
}
ATTENTION = {"q_proj": (128, HIDDEN), "k_proj": (64, HIDDEN), "v_proj": (64, HIDDEN), "o_proj": (HIDDEN, 128)}


def published_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers) * (1.0 if shape == (VOCAB, HIDDEN) else 2 * shape[-1] ** -0.5)

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(HIDDEN, generator=numbers)

    found = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN), "lm_head.weight": normal(VOCAB, HIDDEN)}
    found["model.norm.weight"] = norm()
    for number, block in enumerate(config["block_configs"]):
        prefix = f"model.layers.{number}."
        if not block["attention"]["no_op"]:
            found[f"{prefix}input_layernorm.weight"] = norm()
            found |= {f"{prefix}self_attn.{name}.weight": normal(*shape) for name, shape in ATTENTION.items()}
        if not block["ffn"]["no_op"]:
            width = WIDTHS[block["ffn"]["ffn_mult"]]
            found[f"{prefix}post_attention_layernorm.weight"] = norm()
            found |= {f"{prefix}mlp.{name}_proj.weight": normal(width, HIDDEN) for name in ("gate", "up")}
            found[f"{prefix}mlp.down_proj.weight"] = normal(HIDDEN, width)
    return found


def publish(name: str, folder: Path) -> None:
    save_file(published_tensors(PUBLISHED[name]), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))


def whole_llama(config: dict[str, Any]) -> LlamaForCausalLM:
    """Make transformers' own Llama with the same choices: what a layer lacks of its parts is zeros."""
    own = ("hidden_size", "num_attention_heads", "num_hidden_layers", "rms_norm_eps", "vocab_size", "rope_theta")
    said = {key: config[key] for key in (*own, "rope_scaling", "max_position_embeddings")}
    model = LlamaForCausalLM(LlamaConfig(**said, num_key_value_heads=1, intermediate_size=WIDEST)).eval()
    tensors = published_tensors(config)
    for name, parameter in model.named_parameters():
        parameter.data = torch.zeros_like(parameter)
        if (tensor := tensors.pop(name, None)) is not None:
            parameter.data[tuple(slice(size) for size in tensor.shape)] = tensor
    assert not tensors
    return model
