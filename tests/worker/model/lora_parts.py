"""LoRA adapters of random numbers in PEFT's form, and transformers' models that compute with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from swiftbatch.worker.model.causal_lm import load_causal_lm
from swiftbatch.worker.model.lora import WEIGHTS_FILE, LoraFiles, locate_loras
from swiftbatch.worker.model.model_files import locate_model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def linears(model: Path, targets: Sequence[str]) -> dict[str, nn.Linear]:
    named = load_causal_lm(locate_model(str(model)), torch.float32).named_modules()
    is_target = {name: each for name, each in named if name.rpartition(".")[2] in targets}
    return {name: each for name, each in is_target.items() if isinstance(each, nn.Linear)}


def write_adapter(
    folder: Path, model: Path, seed: int = 1, targets: Sequence[str] = ALL, rank: int = 8, **said: Any
) -> Path:
    """Write an adapter that changes a model's texts visibly; `said` are more keys of its config."""
    random, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, linear in linears(model, targets).items():
        own = next((each for key, each in said.get("rank_pattern", {}).items() if name.endswith(key)), rank)
        down, up = torch.empty(own, linear.in_features), torch.empty(linear.out_features, own)
        tensors[f"base_model.model.{name}.lora_A.weight"] = down.normal_(generator=random) * linear.in_features**-0.5
        tensors[f"base_model.model.{name}.lora_B.weight"] = up.normal_(generator=random) * 0.2
    write(folder, tensors, r=rank, lora_alpha=16, target_modules=[*targets], **said)
    return folder


def write(folder: Path, tensors: dict[str, Tensor], **config: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_FILE)
    as_saved = {"peft_type": "LORA", "bias": "none", "use_dora": False, "modules_to_save": None, "lora_dropout": 0.05}
    (folder / "adapter_config.json").write_text(json.dumps(as_saved | config), encoding="utf-8")


def located(**folders: Path) -> list[LoraFiles]:
    return locate_loras([f"{name}={folder}" for name, folder in folders.items()], {})


def with_adapter(model: Path, folder: Path, scales: dict[str, float]) -> Any:
    """Return transformers' model with an adapter in float32; `scales` are by the end of a module's name."""
    theirs, tensors = load_causal_lm(locate_model(str(model)), torch.float32), load_file(folder / WEIGHTS_FILE)
    for name, module in theirs.named_modules():
        if (down := tensors.get(f"base_model.model.{name}.lora_A.weight")) is not None:
            up = tensors[f"base_model.model.{name}.lora_B.weight"]
            scale = next(each for end, each in scales.items() if name.endswith(end))
            module.register_forward_hook(
                lambda _, given, out, down=down, up=up, scale=scale: out + scale * (given[0] @ down.T @ up.T)
            )
    return theirs
