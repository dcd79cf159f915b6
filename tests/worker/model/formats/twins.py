"""Tiny models in a format, each with its dequantized twin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from tests.worker.model.formats.examples import Example, Value, numbers_of

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 64, "vocab_size": 97, "max_position_embeddings": 512}
LLAMA = SIZES | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
LINEARS = {
    "self_attn.q_proj": (128, 64),
    "self_attn.k_proj": (64, 64),
    "self_attn.v_proj": (64, 64),
    "self_attn.o_proj": (64, 128),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
GPT_OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
PACKED = ("_proj.weight", "_proj_with_mqa.weight", ".wq_b.weight", ".wk.weight")  # ends of names
PLAIN = ".weights_proj.weight"
TEXT = [5, 17, 60, 3, 88, 41, 9, 9, 72, 30, 55, 2, 61, 14, 90, 33, 7, 26]


def llama_tensors(numbers: torch.Generator) -> dict[str, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers).to(torch.bfloat16)

    found = {"model.embed_tokens.weight": normal(97, 64), "lm_head.weight": normal(97, 64)}
    found["model.norm.weight"] = 1 + normal(64) / 8
    for name in ("input_layernorm", "post_attention_layernorm"):
        found[f"model.layers.0.{name}.weight"] = 1 + normal(64) / 8
    return found | {f"model.layers.0.{name}.weight": torch.empty(shape) for name, shape in LINEARS.items()}


def make_twins(
    example: Example, folder: Path, config: dict[str, Any] = LLAMA, tensors: dict[str, Tensor] | None = None
) -> tuple[Path, Path]:
    """Make a float32 twin."""
    packed, values = make_packed(example, folder / "packed", config, tensors)
    numbers = torch.Generator().manual_seed(11)
    dense = llama_tensors(numbers) if tensors is None else dict(tensors)
    dense |= {name: numbers_of(value, *dense[name].shape) for name, value in values.items()}
    return packed, written(folder / "dense", config, dense)


def make_packed(
    example: Example, folder: Path, config: dict[str, Any] = LLAMA, tensors: dict[str, Tensor] | None = None
) -> tuple[Path, dict[str, Value]]:
    """Return the projections' numbers."""
    numbers = torch.Generator().manual_seed(11)
    packed, values = dict[str, Tensor](), dict[str, Value]()
    for name, tensor in (llama_tensors(numbers) if tensors is None else tensors).items():
        is_head = name == "lm_head.weight" and example.packs_head
        if not is_head and (not name.endswith(PACKED) or name.endswith(PLAIN)):
            packed[name] = tensor
            continue
        parts, values[name] = example.make(*tensor.shape, numbers)
        packed |= {f"{name.removesuffix('weight')}{part}": each for part, each in parts.items()}
    said = config | ({"quantization_config": example.config} if example.config else {})
    written(folder, said, packed)
    if example.file:
        (folder / "hf_quant_config.json").write_text(json.dumps(example.file))
    return folder, values


def written(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write two files, so that a matrix's parts may be separated."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shards = {f"model-{which}.safetensors": {n: tensors[n] for n in sorted(tensors)[which::2]} for which in (0, 1)}
    for file, each in shards.items():
        save_file(each, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, each in shards.items() for name in each}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def load(folder: Path, dtype: str) -> TargetModel:
    return TargetModel.load(locate_model(str(folder)), dtype, "cpu")


def logits_of(target: TargetModel, token_ids: list[int] = TEXT) -> Tensor:
    cache, found = target.new_cache(len(token_ids) + 64), []
    while cache.length < len(token_ids):
        found.append(target.logits(target.read(cache, token_ids[cache.length :])))
    return torch.cat(found)


def write_mxfp4(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Path, Path]:
    """Write gpt-oss' packed experts, and a twin."""
    numbers, packed, dense = torch.Generator().manual_seed(5), dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, depth, rows = packed.pop(name).shape
        blocks = torch.randint(0, 256, (num_experts, rows, depth // 32, 16), generator=numbers).to(torch.uint8)
        scales = torch.randint(119, 124, blocks.shape[:-1], generator=numbers).to(torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
    assert len(packed) > len(dense)
    written(folder / "packed", config | {"quantization_config": GPT_OSS}, packed)
    written(folder / "dense", config, dense)
    return folder / "packed", folder / "dense"
