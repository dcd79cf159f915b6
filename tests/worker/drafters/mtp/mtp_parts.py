"""Random MTP layers with published keys and names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from swiftbatch.worker.drafters.griffin.draft_input import regressed_place
from swiftbatch.worker.drafters.mtp.mtp import MTPForwards, rows_of
from swiftbatch.worker.drafters.mtp.predictor import PredictorModule, load_predictor
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model, read_config
from swiftbatch.worker.model.mtp_layers import FORMS, ONE_LAYER, OWN, MTPSpec
from tests.worker.model.dense_configs import PUBLISHED as DENSE
from tests.worker.model.expert_configs import WITH_EXPERTS as EXPERTS
from tests.worker.model.latent_configs import WITH_LATENTS
from tests.worker.model.test_hybrid_configs import PUBLISHED as HYBRIDS
from tests.worker.model.test_hybrid_configs import publish

OF_LAYERS, OF_MIMO, OF_DEEPSEEK = FORMS
TWO_LAYERS = {  # one of each form
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
}
CHECKPOINTS: dict[str, tuple[dict[str, Any], MTPSpec]] = {
    "DeepSeek R1": (WITH_LATENTS["DeepSeek R1"], OF_DEEPSEEK),
    "GLM 4.5": (EXPERTS["GLM 4.5"], OF_DEEPSEEK),
    "MiMo": (DENSE["MiMo 7B, which is Qwen2 with a layer more"], OF_MIMO),
    "Qwen3.5": (HYBRIDS["Qwen3.5"] | TWO_LAYERS, OF_LAYERS),
    "Qwen3-Next": (HYBRIDS["Qwen3-Next"], OF_LAYERS),
}


def publish_with_layer(name: str, folder: Path) -> PredictorModule:
    """Return the layer in torch."""
    config, form = CHECKPOINTS[name]
    if config["model_type"] == "mimo":  # that class is not transformers' own, its layers are
        publish(config | {"model_type": "qwen2"}, folder)
        (folder / "config.json").write_text(json.dumps(config))
    else:
        publish(config, folder)
    view = read_config(str(folder), folder)
    torch.manual_seed(7)
    module = PredictorModule(view).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter += 0.1 * torch.randn_like(parameter) if parameter.ndim == 1 else 0.0
    tensors = load_file(folder / "model.safetensors")
    stored = module.tensors()
    if form.is_hidden_first:
        stored[f"{OWN}join.weight"] = stored[f"{OWN}join.weight"].roll(config["hidden_size"], dims=1)
    tensors |= {_published(each, form, view["num_hidden_layers"]): tensor for each, tensor in stored.items()}
    tensors |= {each.format(view["num_hidden_layers"]): torch.zeros(3) for each in form.copies}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return module


def loaded(folder: Path, dtype: str = "float32") -> TargetModel:
    target = TargetModel.load(locate_model(str(folder)), dtype, "cpu")
    assert isinstance(target.forwards, NativeForwards)
    return target


def forwards_of(target: TargetModel, num_candidates: int = 4) -> MTPForwards:
    return MTPForwards(rows_of(load_predictor(None, target), target, num_candidates), target)


def fed(forwards: MTPForwards, name: str, row: int = 0) -> torch.Tensor:
    """Return the feature `[hidden]` before a row; the root is row 0."""
    return forwards._tracks[name].room.features.rows([regressed_place(row)])[0]


def _published(name: str, form: MTPSpec, num_layers: int) -> str:
    if name.startswith(ONE_LAYER):
        return form.layer.format(num_layers) + name.removeprefix(ONE_LAYER)
    role, _, what = name.removeprefix(OWN).partition(".")
    return f"{form.names[role].format(num_layers)}.{what}"
