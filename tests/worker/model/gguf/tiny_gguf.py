"""Tiny random GGUF models and twins, made by other libraries alone.

Names come from the package `gguf`; changes of llama.cpp's converter are repeated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from tests.worker.model.gguf.block_bytes import random_matrix

MERGES = ("Ġ t", "h e", "i n", "Ġt he", "e r")
TOKENS = [*sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES), "<|endoftext|>", "<|im_end|>"]
CONTROL, NORMAL = 3, 1
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|im_end|>{% endfor %}assistant: "
)
MIXED = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "F16",
    "BF16",
    "F32",
)
SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": len(TOKENS) - 2,
    "eos_token_id": len(TOKENS) - 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
WINDOW = {"attention.sliding_window": 16}


@dataclass(frozen=True)
class Tiny:
    """A GGUF architecture: its twin's config, and its file's metadata."""

    config: dict[str, Any]
    said: dict[str, Any] = field(default_factory=dict)
    has_paired_heads: bool = False
    has_raised_norms: bool = False


TINY = {
    "gemma": Tiny({"model_type": "gemma", "tie_word_embeddings": True, **ROPE}, has_raised_norms=True),
    "gemma2": Tiny(
        {
            "model_type": "gemma2",
            "sliding_window": 16,
            "query_pre_attn_scalar": 64,
            "tie_word_embeddings": True,
            **ROPE,
        },
        {**WINDOW, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        has_raised_norms=True,
    ),
    "gemma3": Tiny(
        {
            **{"model_type": "gemma3_text", "sliding_window": 16, "query_pre_attn_scalar": 64, "num_hidden_layers": 6},
            **{"tie_word_embeddings": True, "rope_parameters": GEMMA_ROPE},
        },
        {**WINDOW, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1_000_000.0},
        has_raised_norms=True,
    ),
    "granite": Tiny(
        {
            **{"model_type": "granite", "attention_multiplier": 0.015625, "embedding_multiplier": 12.0},
            **{"residual_multiplier": 0.22, "logits_scaling": 8.0, **ROPE},
        },
        {"attention.scale": 0.015625, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0},
        has_paired_heads=True,
    ),
    "llama": Tiny({"model_type": "llama", **ROPE}, has_paired_heads=True),
    "phi3": Tiny({"model_type": "phi3", "sliding_window": None, **ROPE}, {"attention.sliding_window": 0}),
    "qwen2": Tiny({"model_type": "qwen2", **ROPE}),
    "qwen2moe": Tiny(
        {
            **{"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
            **{"shared_expert_intermediate_size": 512, "norm_topk_prob": False, **ROPE},
        },
        {
            **{"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256},
            "expert_shared_feed_forward_length": 512,
        },
    ),
    "qwen3": Tiny({"model_type": "qwen3", **ROPE}),
    "qwen3moe": Tiny(
        {
            **{"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
            **{"norm_topk_prob": True, **ROPE},
        },
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256},
    ),
    "smollm3": Tiny({"model_type": "smollm3", "num_hidden_layers": 5, **ROPE}, has_paired_heads=True),
}


def twin_config(name: str) -> PreTrainedConfig:
    config = {**SIZES, **TINY[name].config}
    return AutoConfig.for_model(config.pop("model_type"), **config)


def write_tiny(
    name: str, folder: Path, dtype: torch.dtype, types: Sequence[str] = MIXED, **said: Any
) -> tuple[Path, Path]:
    torch.manual_seed(5)
    config = twin_config(name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    writer = GGUFWriter(folder / f"{name}.gguf", name)
    write_metadata(writer, name, config, said)
    numbers = _with_random_tensors(writer, name, model, types)
    model.load_state_dict(numbers)
    twin = folder / f"twin-{name}"
    model.to(dtype).save_pretrained(twin)
    finish(writer)
    return folder / f"{name}.gguf", twin


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_metadata(writer: GGUFWriter, name: str, config: PreTrainedConfig, said: dict[str, Any]) -> None:
    """`said` changes the converter's metadata."""
    rope = config.rope_parameters
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": SIZES["head_dim"],
        "attention.value_length": SIZES["head_dim"],
        "rope.freq_base": rope.get("rope_theta", 0.0),
        **TINY[name].said,
        **said,
    }
    for key, value in values.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"{name}.{key}", value)
    write_tokenizer(writer)


def write_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL if token.startswith("<|") else NORMAL for token in TOKENS])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(len(TOKENS) - 2)
    writer.add_eos_token_id(len(TOKENS) - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _with_random_tensors(writer: GGUFWriter, name: str, model: Any, types: Sequence[str]) -> dict[str, torch.Tensor]:
    """Use one type after another for matrices; return the numbers."""
    arch = next(arch for arch, said in gguf.MODEL_ARCH_NAMES.items() if said == name)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    found: dict[str, torch.Tensor] = {}
    rng = np.random.default_rng(9)
    for number, (key, parameter) in enumerate(model.state_dict().items()):
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            found[key] = found["model.embed_tokens.weight"]
            continue
        if key.endswith("experts.gate_up_proj"):
            halves = [
                _add(writer, names, key.replace("gate_up", part), half, rng, types[number % len(types)])
                for part, half in zip(("gate", "up"), parameter.chunk(2, dim=1), strict=True)
            ]
            found[key] = torch.cat(halves, dim=1)
            continue
        stored = _add(writer, names, key, parameter, rng, types[number % len(types)])
        found[key] = _read_back(stored, key, name, model.config)
    return found


def _add(
    writer: GGUFWriter, names: Any, key: str, parameter: torch.Tensor, rng: np.random.Generator, kind: str
) -> torch.Tensor:
    """Return the tensor's numbers."""
    base, suffix = (
        (key.rsplit(".", 1)[0], "." + key.rsplit(".", 1)[1]) if key.endswith(("weight", "bias")) else (key, ".weight")
    )
    stored_name = names.get_name(base) + suffix
    if parameter.dim() == 1 or "mlp.gate." in key or "shared_expert_gate" in key:
        numbers = rng.normal(1 if "norm" in key else 0, 0.1, parameter.shape).astype(np.float32)
        writer.add_tensor(stored_name, numbers[0] if "shared_expert_gate" in key else numbers)
        return torch.from_numpy(numbers)
    data, numbers = random_matrix(kind, tuple(parameter.shape), rng)
    raw = None if kind in ("F32", "F16") else GGMLQuantizationType[kind]
    writer.add_tensor(stored_name, data, raw_dtype=raw)
    return torch.from_numpy(numbers)


def _read_back(stored: torch.Tensor, key: str, name: str, config: PreTrainedConfig) -> torch.Tensor:
    """Undo the converter's interleaved head halves, and norms plus one."""
    tiny = TINY[name]
    if tiny.has_raised_norms and key.endswith("norm.weight"):
        return stored - 1
    for part, heads in ((".q_proj.", config.num_attention_heads), (".k_proj.", config.num_key_value_heads)):
        if tiny.has_paired_heads and part in key:
            return (
                stored.view(heads, stored.shape[0] // heads // 2, 2, *stored.shape[1:])
                .transpose(1, 2)
                .reshape(stored.shape)
            )
    return stored
