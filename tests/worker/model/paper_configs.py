"""Published config.json files of the models that the papers of our engines use.

Sizes are cut down. All were published as `pytorch_model.bin`, most with constants that are no weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
EVERYWHERE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "llama",
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 64,
    **SMALL,
}
LLAMA2 = EVERYWHERE | {
    "max_position_embeddings": 4096,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "transformers_version": "4.32.0.dev0",
}
VICUNA = EVERYWHERE | {
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "transformers_version": "4.28.1",
}
YARN = {"factor": 32.0, "original_max_position_embeddings": 4096, "type": "yarn", "finetuned": True}
YARN_LLAMA2 = LLAMA2 | {
    "auto_map": {
        "AutoConfig": "configuration_llama.LlamaConfig",
        "AutoModelForCausalLM": "modeling_llama_together_yarn.LlamaForCausalLM",
    },
    "max_position_embeddings": 131072,
    "pad_token_id": 0,
    "rope_scaling": YARN,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.31.0",
}
LWM = EVERYWHERE | {
    "attention_bias": False,
    "max_position_embeddings": 131072,
    "max_sequence_length": 131072,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "transformers_version": "4.38.0.dev0",
}
PAPERS: dict[str, dict[str, Any]] = {
    "Llama-2-7b-chat": LLAMA2,
    "Llama-2-13b-chat in its first form": LLAMA2 | {"max_length": 4096, "pretraining_tp": 2},
    "Vicuna 7B v1.3": VICUNA,
    "Vicuna 13B v1.5": LLAMA2 | {"pad_token_id": 0, "transformers_version": "4.31.0"},
    "Vicuna 7B v1.5 16K": LLAMA2
    | {"max_sequence_length": 16384, "pad_token_id": 0, "rope_scaling": {"factor": 4.0, "type": "linear"}},
    "Vicuna 33B v1.3": {key: each for key, each in VICUNA.items() if key != "max_position_embeddings"}
    | {"max_sequence_length": 2048},
    "YaRN-Llama-2-7b-128k": YARN_LLAMA2,
    "YaRN-Llama-2-7b-128k as newer versions save it": YARN_LLAMA2
    | {"rope_parameters": YARN | {"rope_theta": 10000.0, "rope_type": "yarn"}, "rope_scaling": None},
    "LWM-Text-Chat-128K": LWM,
    "LWM-Text-Chat-1M with words of its own code": LWM
    | {
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "max_position_embeddings": 1048576,
        "max_sequence_length": 1048576,
        "mesh_dim": "1,-1,4,1",
        "param_scan_axis": 0,
        "remat_block": "",
        "resid_pdrop": 0.0,
        "rope_theta": 50000000.0,
        "scan_attention": True,
        "scan_key_chunk_size": 1024,
        "scan_layers": True,
        "scan_mlp": True,
        "scan_mlp_chunk_size": 1024,
        "scan_query_chunk_size": 1024,
        "theta": 50000000,
    },
    "llama-68m": EVERYWHERE
    | {
        "bos_token_id": 0,
        "max_position_embeddings": 2048,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-06,
        "torch_dtype": "float32",
        "transformers_version": "4.29.2",
    },
}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {  # refused, with words of the reason
    "angles that change with the text": (LLAMA2 | {"rope_scaling": {"factor": 2.0, "type": "dynamic"}}, "dynamic"),
    "YaRN's angles that change with the text": (
        LLAMA2 | {"rope_scaling": YARN | {"finetuned": False, "type": "dynamic-yarn"}},
        "dynamic-yarn",
    ),
    "LWM's base alone": (
        {key: each for key, each in LWM.items() if key != "rope_theta"} | {"theta": 10000000},
        "theta = 10000000 and rope_theta = 10000.0; expected the same base",
    ),
}


def publish(name: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> None:
    """Save a random model beside its published config, with the constants that older versions wrote."""
    torch.manual_seed(3)
    config = PAPERS[name] | changes
    said = {key: each for key, each in json.loads(json.dumps(config)).items() if key != "auto_map"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**said))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    tensors = {name: tensor.contiguous() for name, tensor in model.to(dtype).state_dict().items()}
    for layer in range(said["num_hidden_layers"]):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def pickle_weights(folder: Path, num_shards: int = 1) -> None:
    """Replace safetensors with what `torch.save` writes."""
    if not (folder / "model.safetensors").exists():
        return
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if num_shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    placed = {name: f"pytorch_model-{1 + i % num_shards:05}-of-{num_shards:05}.bin" for i, name in enumerate(tensors)}
    for file in set(placed.values()):
        torch.save({name: tensors[name] for name in tensors if placed[name] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": placed}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
