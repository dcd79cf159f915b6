"""GRIFFIN's weights as one file: written by training, read for a target, refused where they do not fit."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from worker.drafters.griffin.model import GriffinConfig, GriffinModel
from worker.drafters.parts import FINGERPRINT
from worker.model.files import GRIFFIN_FILE, ModelError
from worker.target.target import TargetModel

CONFIG = "griffin_config"  # in the file's header: a JSON object


def save_griffin(folder: Path, model: GriffinModel, model_fingerprint: str) -> None:
    """Write a draft model in bf16, with its config and the fingerprint of its target, to `folder`."""
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    header = {FINGERPRINT: model_fingerprint, CONFIG: json.dumps(asdict(model.config))}
    save_file(tensors, folder / GRIFFIN_FILE, metadata=header)


def load_griffin(folder: Path, target: TargetModel) -> GriffinModel:
    """Read the draft model in `folder`, in the target's dtype and on its device.

    Raises ModelError where there is none, or where it was made for another model.
    """
    path = folder / GRIFFIN_FILE
    training = f"swiftbatch train griffin --model {target.files.name} --data DIR --output {folder}"
    if not path.is_file():
        raise ModelError(f"griffin {path}: no such file; train it with `{training}`")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise ModelError(f"griffin {path}: not a safetensors file: {error}; train it anew with `{training}`") from error
    _check_fingerprint(path, header.get(FINGERPRINT, "none"), target, training)
    model = _build(path, header.get(CONFIG, ""), training)
    _check_sizes(path, model.config, target, training)
    _check_tensors(path, model, tensors, training)
    model.load_state_dict(tensors)
    return model.to(target.device, target.dtype).eval().requires_grad_(False)


def _check_fingerprint(path: Path, found: str, target: TargetModel, training: str) -> None:
    expected = target.files.fingerprint
    if found != expected:
        raise ModelError(
            f"griffin {path}: trained for the model with fingerprint {found[:12]}, but {target.files.name} has "
            f"{expected[:12]}; train one for it with `{training}`"
        )


def _build(path: Path, config: str, training: str) -> GriffinModel:
    try:
        return GriffinModel(GriffinConfig(**json.loads(config)))
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"griffin {path}: header `{CONFIG}`: {error}; train it anew with `{training}`") from error


def _check_sizes(path: Path, config: GriffinConfig, target: TargetModel, training: str) -> None:
    size = target.model.config.hidden_size
    if config.hidden_size != size:
        raise ModelError(
            f"griffin {path}: features of {config.hidden_size} numbers, but {target.files.name} has {size}; "
            f"train one for it with `{training}`"
        )


def _check_tensors(path: Path, model: GriffinModel, tensors: dict[str, torch.Tensor], training: str) -> None:
    """Refuse anything but the finite tensors that the config says."""
    for name, expected in model.state_dict().items():
        found = tensors.get(name)
        if found is None or found.shape != expected.shape or not found.is_floating_point():
            what = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise ModelError(
                f"griffin {path}: `{name}` is {what}; expected floats {list(expected.shape)}; "
                f"train it anew with `{training}`"
            )
        if not found.isfinite().all():
            raise ModelError(f"griffin {path}: `{name}` has values that are not finite; train it anew: `{training}`")
    if unknown := tensors.keys() - model.state_dict().keys():
        raise ModelError(f"griffin {path}: unknown tensors {', '.join(sorted(unknown))}; train it anew: `{training}`")
