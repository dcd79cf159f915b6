"""Dense decoders straight from their files, without `transformers`, whose import takes seconds: see `dense_config`."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open

from swiftbatch.worker.kernels.decoder_weights import DecoderSizes, DecoderWeights, LayerWeights, Linear
from swiftbatch.worker.model.dense_config import (
    FINAL_NORM,
    FUSED,
    HEAD_NORMS,
    LINEARS,
    NORMS,
    DenseConfig,
    OtherDecoderError,
    read_dense,
    refuse_other_tensors,
)
from swiftbatch.worker.model.digests import weight_files
from swiftbatch.worker.model.files import ModelFiles, read_config
from swiftbatch.worker.model.tensors import read_tensors
from swiftbatch.worker.model.text_view import EMBEDDING, HEAD, text_name

CPU = torch.device("cpu")


def dense_weights(files: ModelFiles, dtype: torch.dtype, device: torch.device = CPU) -> DecoderWeights | None:
    """The weights of a model folder; None for one that is not such a decoder, or whose tensors are not all there.

    Each tensor goes to the device as it is read: for another one than the CPU, the host holds one of them at a time.
    """
    config = read_config(files.name, files.path)
    try:
        dense = read_dense(config)
        refuse_other_tensors(dense, stored_names(files, config))
    except OtherDecoderError:
        return None
    # in this order: fewer bytes pass where files are the narrower
    tensors = read_tensors(files, lambda tensor: tensor.to(device).to(dtype))
    embedding = tensors[EMBEDDING]
    layers = [_layer(tensors, f"model.layers.{number}.", dense) for number in range(dense.num_layers)]
    head = embedding if dense.is_tied else tensors[HEAD]
    return DecoderWeights(_sizes(dense, dtype), embedding, layers, tensors[FINAL_NORM], Linear(head), dense.rotary)


def _sizes(dense: DenseConfig, dtype: torch.dtype) -> DecoderSizes:
    return DecoderSizes(
        num_layers=dense.num_layers,
        hidden=dense.hidden,
        num_heads=dense.num_heads,
        num_kv_heads=dense.num_kv_heads,
        head_dim=dense.head_dim,
        intermediate=dense.intermediate,
        vocab=dense.vocab,
        epsilon=dense.epsilon,
        scale=dense.head_dim**-0.5,
        dtype=dtype,
    )


def stored_names(files: ModelFiles, config: dict[str, Any]) -> set[str]:
    """The names of a text model's tensors in its files, without a head that is tied.

    None of them where one is there twice, as nobody says which of the two it is.
    """
    opened: list[Any] = [safe_open(file, framework="numpy") for file in weight_files(files.path)]
    stored = (text_name(name, config) for file in opened for name in file.keys())  # noqa: SIM118 (no mapping)
    is_tied = config.get("tie_word_embeddings")
    names = [name for name in stored if name is not None and not (name == HEAD and is_tied)]
    return set(names) if len(set(names)) == len(names) else set()


def _layer(tensors: dict[str, torch.Tensor], prefix: str, dense: DenseConfig) -> LayerWeights:
    weights: dict[str, torch.Tensor] = {}
    for part, roles in FUSED.items():
        if (fused := tensors.get(f"{prefix}{part}.weight")) is not None:
            weights |= dict(zip(roles, fused.split([dense.widths[role] for role in roles]), strict=True))
    weights |= {role: tensors[f"{prefix}{part}.weight"] for role, part in LINEARS.items() if role not in weights}
    linears = {role: Linear(weights[role], tensors.get(f"{prefix}{part}.bias")) for role, part in LINEARS.items()}
    norms = {role: tensors[f"{prefix}{part}.weight"] for role, part in NORMS.items()}
    head_norms = {role: tensors.get(f"{prefix}{part}.weight") for role, part in HEAD_NORMS.items()}
    return LayerWeights(**linears, **norms, **head_norms)  # type: ignore[arg-type]
