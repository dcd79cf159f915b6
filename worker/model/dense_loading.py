"""Dense decoders straight from their files, without `transformers`, whose import takes seconds: see `dense_config`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from swiftbatch.worker.kernels.decoder_weights import AnyLinear, DecoderSizes, DecoderWeights, LayerWeights, linear_from
from swiftbatch.worker.kernels.packed_weights import PackedMatrix, Weight, plain
from swiftbatch.worker.model.dense_config import (
    PRODUCTS,
    SINKS,
    DenseConfig,
    OtherDecoderError,
    read_dense,
    refuse_other_tensors,
)
from swiftbatch.worker.model.dense_names import ATTENTION
from swiftbatch.worker.model.expert_layers import expert_weights
from swiftbatch.worker.model.mixer_layers import latent_linears, mixer_weights, of_rows
from swiftbatch.worker.model.model_files import ModelFiles, read_config, stored_layout
from swiftbatch.worker.model.text_config import EMBEDDING, HEAD, HEAD_BIAS, is_of_text
from swiftbatch.worker.model.weight_reading import read_tensors

CPU = torch.device("cpu")
SCALES_WITHIN = ("attention_in_scale", "key_scale", "attention_out_scale", "gate_scale", "down_scale")  # a layer


def dense_weights(files: ModelFiles, dtype: torch.dtype, device: torch.device = CPU) -> DecoderWeights | None:
    """The weights of a model folder; None for one that is not such a decoder, or whose tensors are not all there or do
    not fit its config, of which `transformers` tells more.

    Each tensor goes to the device as it is read: for another one than the CPU, the host holds one of them at a time.
    """
    config = read_config(files.name, files.path)
    try:
        dense = read_dense(config)
        refuse_other_tensors(dense, stored_names(files, config))
    except OtherDecoderError:
        return None
    place = functools.partial(_placed, device=device, dtype=dtype)
    tensors = read_tensors(files, dtype, place, _floats_of(dense))
    try:
        return decoder_of(tensors, dense, dtype)
    except (ValueError, IndexError):
        return None


def decoder_of(tensors: Mapping[str, Weight], dense: DenseConfig, dtype: torch.dtype) -> DecoderWeights:
    """A decoder of tensors where they lie. Raises ValueError or IndexError for those that do not fit its config."""
    layers = [_layer(tensors, number, dense, dtype) for number in range(dense.num_layers)]
    head_bias = plain(tensors[HEAD_BIAS]) if dense.has_head_bias else None
    head = linear_from(tensors[EMBEDDING if dense.is_tied else HEAD], head_bias)
    final_norm = _norm(tensors, dense.form.final_norm, dense)
    return DecoderWeights(_sizes(dense, dtype), tensors[EMBEDDING], layers, final_norm, head, dense.rotary)


def layer_alone(
    tensors: Mapping[str, Weight], dense: DenseConfig, dtype: torch.dtype
) -> tuple[DecoderSizes, LayerWeights]:
    """The sizes and the layer of a model of one layer, from its tensors as they are stored.

    Raises ValueError or IndexError for those that do not fit.
    """
    kept = _floats_of(dense)
    placed = {name: each if name in kept else _placed(each, CPU, dtype) for name, each in tensors.items()}
    return _sizes(dense, dtype), _layer(placed, 0, dense, dtype)


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
        head_norms_differ=dense.form.head_norms_differ,
        gates_heads=dense.form.gates_heads,
        score_cap=dense.caps.get("scores", 0.0),
        logit_cap=dense.caps.get("logits", 0.0),
        latent=None if dense.latent is None else dense.latent.sizes,
        **{name: dense.scales[name] for name in SCALES_WITHIN if name in dense.scales},
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


def _floats_of(dense: DenseConfig) -> frozenset[str]:
    """The tensors that are float32 in the kernels, whatever the model's dtype."""
    if dense.experts is None:
        return frozenset()
    names = (dense.experts.names.router, dense.experts.names.router_bias, dense.experts.names.choice_bias, SINKS)
    layers = range(dense.num_layers)
    return frozenset(f"model.layers.{number}.{name}" for number in layers for name in names if name is not None)


def _layer(tensors: Mapping[str, Weight], number: int, dense: DenseConfig, dtype: torch.dtype) -> LayerWeights:
    prefix = f"model.layers.{number}."
    parts, widths = _parts(dense.linears(number)), dense.widths(number)
    linears = {role: each for part in parts.items() for role, each in _linears(tensors, prefix, part, widths)}
    norms: dict[str, Any] = {role: _norm(tensors, prefix + part, dense) for role, part in dense.form.norms.items()}
    if dense.attends(number):
        norms |= {role: _head_norm(tensors, prefix + part, dense) for role, part in dense.head_norms.items()}
        linears = (
            latent_linears(linears, dense.latent) if dense.latent is not None else linears | _heads(linears, dense)
        )
    view: dict[str, Any] = {"is_still": number in dense.still_layers, "window": dense.windows[number]}
    view["rotary"] = dense.other_rotary if number in dense.other_layers else None
    view["curve"] = _curve([plain(tensors[prefix + part]) for part in dense.form.curve])
    if dense.form.has_sinks:
        view["sinks"] = plain(tensors[prefix + SINKS]).float()
    if dense.experts is not None and number in dense.experts.layers:
        view["experts"] = expert_weights(tensors, prefix, dense.experts, dtype)
    if dense.mixer is not None and number in dense.mixer.layers:
        view["mixer"] = mixer_weights(tensors, prefix, dense.mixer, dtype)
    absent: dict[str, Any] = dict.fromkeys((*ATTENTION, *PRODUCTS))
    return LayerWeights(**absent | linears, **norms, **view)


def _heads(linears: Mapping[str, AnyLinear], dense: DenseConfig) -> dict[str, AnyLinear]:
    """Queries and keys in the kernels' order of a head's dimensions, and gates of their own."""
    found = {role: linears[role] for role in ("query", "key")}
    if dense.form.gates_heads:
        dim, query = dense.head_dim, found["query"]
        found["query"] = _of_heads(query, list(range(dim)), 2 * dim)
        found["head_gate"] = _of_heads(query, list(range(dim, 2 * dim)), 2 * dim)
    if (order := dense.head_order) is not None:
        found |= {role: _of_heads(found[role], order, dense.head_dim) for role in ("query", "key")}
    return found


def _norm(tensors: Mapping[str, Weight], part: str, dense: DenseConfig) -> Tensor:
    """The weights of a norm of rows, and behind them its biases."""
    found = [plain(tensors[name]) for name in dense.form.norm_tensors(part)]
    return found[0] if len(found) == 1 else torch.cat(found)


def _head_norm(tensors: Mapping[str, Weight], part: str, dense: DenseConfig) -> Tensor:
    """The weights of a norm of heads, in the kernels' order of a head's dimensions."""
    weight = plain(tensors[f"{part}.weight"]).flatten()
    if (order := dense.head_order) is None:
        return weight
    if len(weight) % dense.head_dim:
        raise ValueError(f"found {len(weight)} weights of {part}, expected one for each dimension of a head")
    return weight.view(-1, dense.head_dim)[:, order].flatten()


def _curve(trained: list[Tensor]) -> Tensor | None:
    """The numbers of XIELU from what is stored of it; None for another activation."""
    if not trained:
        return None
    squares, exponentials, share, bound = (number.flatten() for number in trained)
    found: list[Tensor] = [softplus(squares), share + softplus(exponentials), share, bound]
    return torch.cat(found).float()


def _parts(names: Mapping[str, str]) -> dict[str, list[str]]:
    """The stored linear layers, and the roles whose rows each holds one behind the other."""
    parts: dict[str, list[str]] = {}
    for role, part in names.items():
        parts.setdefault(part, []).append(role)
    return parts


def _linears(
    tensors: Mapping[str, Weight], prefix: str, part: tuple[str, list[str]], rows: Mapping[str, int]
) -> Iterator[tuple[str, AnyLinear]]:
    """The roles of a stored linear layer, each with its rows. Raises ValueError for one of other rows."""
    name, roles = part
    weight, stored = tensors[f"{prefix}{name}.weight"], tensors.get(f"{prefix}{name}.bias")
    bias = None if stored is None else plain(stored)
    widths = [rows[role] for role in roles if len(roles) > 1 or role in ("gate", "up")]
    if widths and any(each.shape[0] != sum(widths) for each in (weight, bias) if each is not None):
        raise ValueError(f"found rows of {name} that are not those of {roles}")
    if len(roles) == 1:
        yield roles[0], linear_from(weight, bias)
        return
    biases = [None] * len(roles) if bias is None else bias.split(widths)
    yield from zip(roles, map(linear_from, weight.split(widths), biases), strict=True)


def _of_heads(linear: AnyLinear, dims: list[int], width: int) -> AnyLinear:
    """Some dimensions of each head, in this order; heads are so wide. Raises ValueError where rows are no heads."""
    rows = [head + dim for head in range(0, linear.weight.shape[0], width) for dim in dims]
    if not rows:
        raise ValueError("found 0 rows, expected those of heads")
    bias = None if linear.bias is None else linear.bias[torch.tensor(rows, device=linear.bias.device)]
    return linear_from(of_rows(linear.weight, rows), bias)
