"""The weights of LoRA adapters, arranged for the kernels."""

from __future__ import annotations

import hashlib

import torch
from safetensors.torch import load
from torch import Tensor
from torch.nn.functional import pad

from swiftbatch.worker.kernels.decoder_weights import AdapterWeights
from swiftbatch.worker.kernels.kernel_sizes import LANES
from swiftbatch.worker.kernels.quantized_weights import plain
from swiftbatch.worker.model.config_values import Config
from swiftbatch.worker.model.decoder_config import DecoderConfig, read_decoder_config
from swiftbatch.worker.model.decoder_loading import rows_by_role
from swiftbatch.worker.model.file_checks import ADAPTER_FILE
from swiftbatch.worker.model.lora import WEIGHTS_FILE, AdaptedLinear, LoraFiles, adapted_linears


def adapter_weights(files: LoraFiles, model_config: Config) -> AdapterWeights:
    """Load an adapter. Raises ModelError if it does not fit the model, or has numbers that are not finite."""
    linears, dense = adapted_linears(files, model_config), read_decoder_config(model_config)
    data = (files.path / WEIGHTS_FILE).read_bytes()
    if hashlib.sha256(data).hexdigest() != files.digests[WEIGHTS_FILE]:
        raise files.fault(f"{files.path / WEIGHTS_FILE} has changed while it was read; give the command again")
    tensors = {name: tensor.float() for name, tensor in load(data).items()}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise files.fault(f"{files.path / WEIGHTS_FILE}: {name} has numbers that are not finite; copy it again")
    layers: list[dict[str, tuple[Tensor, Tensor]]] = [{} for _ in range(dense.num_layers)]
    for linear in linears:
        tensors[linear.up] *= torch.tensor(linear.scale, dtype=torch.float32)
        if not tensors[linear.up].isfinite().all():
            raise files.fault(f"{linear.up} times its scale, {linear.scale:g}, exceeds float32; correct {ADAPTER_FILE}")
        layers[linear.layer] |= _by_role(linear, tensors, dense)
    return AdapterWeights(layers)


def _by_role(
    linear: AdaptedLinear, tensors: dict[str, Tensor], dense: DecoderConfig
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return `down` and `up` of the roles that a linear layer has, padded to the kernels' ranks."""
    num_padded = -linear.rank % LANES
    down = pad(tensors[linear.down], (0, 0, 0, num_padded))
    up = pad(tensors[linear.up], (0, num_padded))
    parts = rows_by_role(up, linear.name, linear.roles, linear.layer, dense)
    return {role: (down, plain(part.weight)) for role, part in parts.items()}
