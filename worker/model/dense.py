"""Dense decoders straight from their files, without `transformers`, whose import takes seconds: see `dense_config`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from swiftbatch.worker.kernels.decoder_weights import AnyLinear, DecoderSizes, DecoderWeights, LayerWeights, linear_from
from swiftbatch.worker.kernels.packed import PackedMatrix, Weight, plain
from swiftbatch.worker.model.dense_config import (
    FINAL_NORM,
    DenseConfig,
    OtherDecoderError,
    read_dense,
    refuse_other_tensors,
)
from swiftbatch.worker.model.files import ModelFiles, read_config, stored_layout
from swiftbatch.worker.model.tensors import read_tensors
from swiftbatch.worker.model.text_view import EMBEDDING, HEAD, is_of_text

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
    tensors = read_tensors(files, dtype, lambda weight: _placed(weight, device, dtype))
    layers = [_layer(tensors, number, dense) for number in range(dense.num_layers)]
    head = linear_from(tensors[EMBEDDING if dense.is_tied else HEAD])
    return DecoderWeights(
        _sizes(dense, dtype), tensors[EMBEDDING], layers, plain(tensors[FINAL_NORM]), head, dense.rotary
    )


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
        scale=dense.scales.get("scores", dense.scales.get("score_width", dense.head_dim) ** -0.5),
        dtype=dtype,
        embedding_scale=_embedding_scale(dense, dtype),
        residual_scale=dense.scales.get("residual", 1.0),
        logit_scale=dense.scales.get("logits_factor", 1.0) / dense.scales.get("logits", 1.0),
        norm_form=dense.form.norm_form,
        activation=dense.activation,
        has_gates=dense.form.has_gates,
        joins_heads=dense.form.joins_heads,
        norms_turned=dense.form.norms_turned,
        is_parallel=dense.form.is_parallel,
    )


def _placed(weight: Weight, device: torch.device, dtype: torch.dtype) -> Weight:
    if isinstance(weight, PackedMatrix):
        return weight.to(device)
    return weight.to(device).to(dtype)  # in this order: fewer bytes pass where files are the narrower


def _embedding_scale(dense: DenseConfig, dtype: torch.dtype) -> float:
    if dense.form.scales_by_width:
        return float(torch.tensor(dense.hidden**0.5).to(dtype))
    return dense.scales.get("embedding", 1.0)


def stored_names(files: ModelFiles, config: dict[str, Any]) -> set[str]:
    """The names of a text model's tensors in its files, without a head that is tied.

    None of them where one is there twice, as nobody says which of the two it is.
    """
    layout = stored_layout(files.name, files.path)
    return set() if layout.repeated else {name for name in layout.heads if is_of_text(name, config)}


def _layer(tensors: Mapping[str, Weight], number: int, dense: DenseConfig) -> LayerWeights:
    prefix = f"model.layers.{number}."
    linears = {role: linear for part in _parts(dense) for role, linear in _linears(tensors, prefix, part, dense)}
    names = {**dense.form.norms, **dense.form.head_norms}
    norms = {role: plain(tensors[f"{prefix}{part}.weight"]) for role, part in names.items()}
    if (order := dense.head_order) is not None:
        linears |= {role: _reordered(linears[role], order) for role in ("query", "key")}
    view: dict[str, Any] = {"is_still": number in dense.still_layers, "window": dense.windows[number]}
    view["rotary"] = dense.window_rotary if number in dense.windowed_layers else None
    return LayerWeights(**linears, **norms, **view)  # type: ignore[arg-type]


def _parts(dense: DenseConfig) -> dict[str, list[str]]:
    """The stored linear layers, and the roles whose rows each holds one behind the other."""
    parts: dict[str, list[str]] = {}
    for role, part in dense.form.linears.items():
        parts.setdefault(part, []).append(role)
    return parts


def _linears(
    tensors: Mapping[str, Weight], prefix: str, part: str, dense: DenseConfig
) -> Iterator[tuple[str, AnyLinear]]:
    """The roles of a stored linear layer, each with its rows."""
    roles, weight, stored = _parts(dense)[part], tensors[f"{prefix}{part}.weight"], tensors.get(f"{prefix}{part}.bias")
    bias = None if stored is None else plain(stored)
    if len(roles) == 1:
        yield roles[0], linear_from(weight, bias)
        return
    widths = [dense.widths[role] for role in roles]
    biases = [None] * len(roles) if bias is None else bias.split(widths)
    yield from zip(roles, map(linear_from, weight.split(widths), biases), strict=True)


def _reordered(linear: AnyLinear, order: list[int]) -> AnyLinear:
    """The same heads with their dimensions in another order."""
    num_rows = linear.weight.shape[0]
    rows = torch.arange(num_rows).unflatten(0, (-1, len(order)))[:, order].flatten()
    weight = linear.weight
    chosen = weight.rows(rows) if isinstance(weight, PackedMatrix) else weight[rows.to(weight.device)]
    return linear_from(chosen, None if linear.bias is None else linear.bias[rows.to(linear.bias.device)])
