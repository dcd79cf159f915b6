"""GRIFFIN's weights as one file: written by training, read for a target, refused where they do not fit."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from swiftbatch.worker.drafters.catalogue import FINGERPRINT, GRIFFIN
from swiftbatch.worker.drafters.trained_part import read_part
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes, layer_weights, linear_of
from swiftbatch.worker.kernels.frequencies import Rotary, default_frequencies
from swiftbatch.worker.model.files import let_others_read
from swiftbatch.worker.papers.griffin.model import SECOND_FUSIONS, GriffinConfig, GriffinModel
from swiftbatch.worker.papers.griffin.native_griffin import GriffinWeights
from swiftbatch.worker.target.target import TargetModel

CONFIG = "griffin_config"  # in the file's header: a JSON object


def save_griffin(folder: Path, model: GriffinModel, model_fingerprint: str) -> None:
    """Write a draft model in bf16, with its config and the fingerprint of its target, to `folder`."""
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    header = {FINGERPRINT: model_fingerprint, CONFIG: json.dumps(asdict(model.config))}
    save_file(tensors, folder / GRIFFIN.name, metadata=header)
    let_others_read(folder / GRIFFIN.name)


def load_griffin(parts_folder: Path | None, target: TargetModel) -> GriffinModel:
    """Read the draft model in a folder, None for the target's own, in the target's dtype and on its device.

    Raises ModelError where there is none, or where it was made for another model.
    """
    part = read_part(GRIFFIN, target, parts_folder)
    try:
        model = GriffinModel(GriffinConfig(**json.loads(part.header.get(CONFIG, ""))))
    except (ValueError, TypeError, KeyError) as error:
        raise part.fault(f"header `{CONFIG}`: {error}") from error
    found, expected = model.config.hidden_size, target.hidden_size
    if found != expected:
        raise part.fault(f"features of {found} numbers, but {target.files.name} has {expected}")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict(part.checked(shapes))
    return model.to(target.device, target.dtype).eval().requires_grad_(False)


def packed_weights(model: GriffinModel, vocab_size: int) -> GriffinWeights:
    """A draft model taken apart, as the kernels want it. Raises ValueError for sizes that they do not take."""
    config, fusion, head = model.config, model.fusion, model.head
    layer_config = config.layer_config()
    sizes = DecoderSizes(
        num_layers=1,
        hidden=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=vocab_size,
        epsilon=layer_config.rms_norm_eps,
        scale=config.head_dim**-0.5,
        dtype=fusion.fuse.weight.dtype,
    )
    return GriffinWeights(
        sizes,
        layer_weights(model.layer),
        Rotary(default_frequencies(layer_config.rope_parameters["rope_theta"], config.head_dim)),
        fuse=linear_of(fusion.fuse),
        parts=list(zip(SECOND_FUSIONS[config.fusion], [linear_of(norm) for norm in fusion.norms], strict=True)),
        expand=None if fusion.up is None else linear_of(fusion.up),
        contract=None if fusion.down is None else linear_of(fusion.down),
        predict=None if head is None else linear_of(head.predict),
        regress=None if head is None else linear_of(head.regress),
    )
