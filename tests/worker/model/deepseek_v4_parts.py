"""DeepSeek V4's published config, cut down, and random models of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_ratios": [0, 4, 128, 4, 0, 128, 0],  # the last one is of a layer that predicts further tokens
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 128,
    "index_head_dim": 48,
    "index_n_heads": 32,  # with few heads scores of 0 tie, and topk of torch chooses any of them
    "index_topk": 6,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hash_layers": 2,
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 2,
    "o_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 64,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 40,
    "swiglu_limit": 1.0,  # which many numbers exceed
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 200,
}
SHORT = PUBLISHED | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [32, 32],
}
OF_MODELOPT = {"quant_algo": "NVFP4", "group_size": 16}
NVFP4 = FP8 | {
    "group_size": 16,
    "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
    "kv_cache_quant_algo": None,
    "moe_quant_algo": "NVFP4",
    "producer": {"name": "modelopt", "version": "dsv4-nvfp4-experts"},
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {f"layers.{number}.ffn.experts": OF_MODELOPT for number in range(6)},
}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
IN_FP8 = (".wq_a.weight", ".wq_b.weight", ".wo_a.weight", ".wo_b.weight", ".attn.wkv.weight")
Packed = tuple[dict[str, Tensor], Tensor]  # stored parts by the ends of their names, and the numbers


def published_name(name: str) -> str:
    """Return the published name of a tensor that transformers wrote, whose embedding and norms have others."""
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def random_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(3)
    said = json.loads(json.dumps(config))  # which its class changes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**said))
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("tid2eid"):
            each.data.copy_(torch.rand(len(each), 8).argsort()[:, : each.shape[1]])
        elif "inv_freq" not in name:
            each.data += 0.15 * torch.randn_like(each)
            each.data = each.data.to(torch.bfloat16)
    with torch.no_grad():
        return {published_name(name): each.clone() for name, each in _saved(model).items()}


def _saved(model: Any) -> dict[str, Tensor]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_v4(folder: Path) -> Path:
    """Write a random model with the published names, short runs of positions, and a layer for further tokens."""
    return write(folder, SHORT, random_tensors(SHORT) | {"mtp.0.e_proj.weight": torch.ones(8, 8)})


def in_blocks(tensor: Tensor) -> Packed:
    """Make e4m3 numbers with a power of two for 32 x 32."""
    rows, columns = tensor.shape
    codes = (4 * torch.randn(rows, columns)).to(torch.float8_e4m3fn)
    exponents = torch.randint(122, 126, (rows // 32, columns // 32), dtype=torch.uint8)
    scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
    spread = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
    return {"weight": codes, "scale": exponents.view(torch.float8_e8m0fnu)}, codes.float() * spread


def _pairs(shape: torch.Size) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    numbers = E2M1[codes.int() & 7] * (1 - 2 * (codes.int() >> 3))
    return codes[:, ::2] | codes[:, 1::2] << 4, numbers


def in_fp4(tensor: Tensor) -> Packed:
    """Make e2m1 numbers with a power of two for 32."""
    pairs, numbers = _pairs(tensor.shape)
    exponents = torch.randint(122, 126, (len(tensor), tensor.shape[1] // 32), dtype=torch.uint8)
    scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127).repeat_interleave(32, 1)
    return {"weight": pairs.view(torch.int8), "scale": exponents.view(torch.float8_e8m0fnu)}, numbers * scales


def in_nvfp4(tensor: Tensor) -> Packed:
    """Make e2m1 numbers with an e4m3 for 16, and one float32."""
    pairs, numbers = _pairs(tensor.shape)
    scales, one = (1 + torch.rand(len(tensor), tensor.shape[1] // 16)).to(torch.float8_e4m3fn), torch.tensor(0.13)
    parts = {"weight": pairs, "weight_scale": scales, "weight_scale_2": one, "input_scale": torch.tensor(1.0)}
    return parts, numbers * (scales.float() * one).repeat_interleave(16, 1)


def twins(folder: Path, quantized: dict[str, Any], experts: Callable[[Tensor], Packed]) -> tuple[Path, Path]:
    """Write a model in FP8 with packed experts, and its dequantized twin."""
    tensors = random_tensors(SHORT)
    packed, dense = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        is_expert = ".experts." in name
        if not is_expert and ("indexer" in name or not name.endswith((*IN_FP8, ".w1.weight", ".w2.weight"))):
            packed[name] = dense[name] = tensor
            continue
        parts, dense[name] = (experts if is_expert else in_blocks)(tensor)
        packed |= {f"{name.removesuffix('weight')}{part}": each for part, each in parts.items()}
    write(folder / "packed", SHORT | {"quantization_config": quantized}, packed)
    return folder / "packed", write(folder / "dense", SHORT, dense)
