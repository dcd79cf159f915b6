"""A decoder's weights from the tensors in a model's files."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from swiftbatch.jobs.start_times import timed
from swiftbatch.worker.kernels.decoder_weights import (
    DecoderSizes,
    DecoderWeights,
    ExpertWeights,
    LayerWeights,
)
from swiftbatch.worker.kernels.quantized_weights import (
    AnyLinear,
    Linear,
    PackedExperts,
    PackedMatrix,
    Weight,
    linear_from,
    plain,
)
from swiftbatch.worker.model.architectures.attention_layers import BLOCK_LINEARS
from swiftbatch.worker.model.architectures.deepseek_v4 import CompressedConfig
from swiftbatch.worker.model.architectures.moe_layers import ROLES, SHARED_NORM, FusedNames, MoEConfig
from swiftbatch.worker.model.architectures.spec import (
    ATTENTION,
    PLE_LINEARS,
    PLE_OF_ALL,
    PLE_OUTPUT_NORM,
    PLE_TABLE,
    STREAM_PARTS,
    STREAMS,
    STREAMS_OF_HEAD,
)
from swiftbatch.worker.model.decoder_config import (
    DecoderConfig,
    OtherDecoderError,
    read_decoder_config,
    refuse_other_tensors,
)
from swiftbatch.worker.model.mixing_weights import (
    compressed_weights,
    indexer_weights,
    latent_linears,
    of_heads,
    of_rows,
    recurrent_weights,
    split_rows,
    stream_weights,
)
from swiftbatch.worker.model.model_files import ModelFiles, read_config, stored_layout
from swiftbatch.worker.model.text_config import EMBEDDING, HEAD, HEAD_BIAS, is_of_text
from swiftbatch.worker.model.weight_files import read_tensors

Tensors = Mapping[str, Weight]
Experts = tuple[Sequence[AnyLinear], Sequence[AnyLinear], Sequence[AnyLinear]]  # gate, up and down projections


def expert_weights(tensors: Tensors, prefix: str, config: MoEConfig, dtype: torch.dtype) -> ExpertWeights:
    """Collect a layer's experts. Raises ValueError if widths differ from the config's."""
    names, is_fused = config.names, config.is_fused(set(tensors), prefix)
    gates, ups, downs = (_fused if is_fused else _one_by_one)(tensors, prefix, config)
    shared_gate = None if not config.shared_width else _floats(tensors, prefix, names.shared_gate)
    has_table = names.choices is not None and prefix + names.choices in tensors
    choice_bias = None if has_table else _floats(tensors, prefix, names.choice_bias)
    found = ExpertWeights(
        config.routing,
        _router(tensors, prefix, config, dtype),
        gates,
        ups,
        downs,
        choice_bias=None if choice_bias is None else choice_bias.flatten(),
        shared_gate=None if shared_gate is None else shared_gate.to(dtype).float(),
        gate_limit=config.gate_limit,
        gate_slope=config.gate_slope,
        latent=_latent(tensors, prefix, config),
        choices=_choices(plain(tensors[f"{prefix}{names.choices}"]), config) if has_table else None,
        **{role: _floats(tensors, prefix, name) for role, name in names.scales.items()},
        **{role: plain(tensors[f"{prefix}{norm}.weight"]) for role, norm in names.norms.items() if role != SHARED_NORM},
    )
    if (widths := (found.intermediate, found.latent_width)) != (expected := (config.width, config.latent_width)):
        raise ValueError(f"found experts of widths {widths}, expected {expected}")
    return found


def _choices(table: Tensor, config: MoEConfig) -> Tensor:
    """Return a table of each token's experts. Raises ValueError for experts that do not exist."""
    if table.dtype.is_floating_point or not 0 <= int(table.min()) <= int(table.max()) < config.routing.num_experts:
        raise ValueError(
            f"found a table of experts of {table.dtype}, expected numbers below {config.routing.num_experts}"
        )
    return table.to(torch.int32)


def _latent(tensors: Tensors, prefix: str, config: MoEConfig) -> tuple[AnyLinear, AnyLinear] | None:
    if not config.latent_width or config.names.latent is None:
        return None
    front, behind = (linear_from(tensors[f"{prefix}{name}.weight"]) for name in config.names.latent)
    return front, behind


def _floats(tensors: Tensors, prefix: str, name: str | None) -> Tensor | None:
    return None if name is None else plain(tensors[prefix + name]).float()


def _router(tensors: Tensors, prefix: str, config: MoEConfig, dtype: torch.dtype) -> Linear:
    weight, bias = (_floats(tensors, prefix, name) for name in (config.names.router, config.names.router_bias))
    assert weight is not None
    if not config.form.keeps_router:
        weight, bias = (None if each is None else each.to(dtype).float() for each in (weight, bias))
    assert weight is not None
    return Linear(weight, bias)


def _one_by_one(tensors: Tensors, prefix: str, config: MoEConfig) -> Experts:
    names, experts = config.names.each, range(config.routing.num_experts)
    assert names is not None
    gates, ups, downs = (
        [linear_from(tensors[prefix + names[role].format(each)]) for each in experts if role in names] for role in ROLES
    )
    return gates, ups, downs


def _fused(tensors: Tensors, prefix: str, config: MoEConfig) -> Experts:
    names = config.names.fused
    assert names is not None
    hidden, width = config.hidden, config.width
    gate_up = _experts_of(tensors[prefix + names.gate_up], names, (2 * width, hidden))
    down = _experts_of(tensors[prefix + names.down], names, (hidden, width))
    gate_up_bias, down_bias = (_biases(tensors, prefix + each, names, config) for each in (names.gate_up, names.down))
    halves = (slice(0, None, 2), slice(1, None, 2)) if names.in_turns else (slice(width), slice(width, None))
    gates, ups = ([*map(_rows_of, gate_up, gate_up_bias, [half] * len(gate_up))] for half in halves)
    return gates, ups, [*map(linear_from, down, down_bias)]


def _experts_of(weight: Weight, names: FusedNames, shape: tuple[int, int]) -> Sequence[Weight]:
    """Return one weight matrix per expert, with one row per output feature."""
    if isinstance(weight, PackedExperts):
        return weight.experts()
    assert isinstance(weight, Tensor)
    is_transposed = weight.shape[1:] != shape if names.is_transposed is None else names.is_transposed
    return [each.T if is_transposed else each for each in weight]


def _biases(tensors: Tensors, name: str, names: FusedNames, config: MoEConfig) -> Sequence[Tensor | None]:
    if names.bias_suffix is None:
        return [None] * config.routing.num_experts
    return [*plain(tensors[name + names.bias_suffix])]


def _rows_of(weight: Weight, bias: Tensor | None, rows: slice) -> AnyLinear:
    chosen = weight.rows(rows) if isinstance(weight, PackedMatrix) else weight[rows]
    return linear_from(chosen, None if bias is None else bias[rows])


# Dense decoders straight from their files, without `transformers`, whose import takes seconds: see `decoder_config`.

CPU = torch.device("cpu")
SCALES_WITHIN = (  # a layer
    *("attention_in_scale", "key_scale", "value_scale", "attention_out_scale"),
    *("gate_scale", "down_scale"),
)


def dense_weights(files: ModelFiles, dtype: torch.dtype, device: torch.device = CPU) -> DecoderWeights | None:
    """Load weights as `fitting_weights` does, or return None where it raises OtherDecoderError."""
    try:
        return fitting_weights(files, dtype, device)
    except OtherDecoderError:
        return None


@timed("weights")
def fitting_weights(files: ModelFiles, dtype: torch.dtype, device: torch.device = CPU) -> DecoderWeights:
    """Load a model folder tensor by tensor.

    Raises OtherDecoderError if the kernels do not support it or tensors do not fit the config.
    """
    config = read_config(files.name, files.path)
    dense = read_decoder_config(config)
    refuse_other_tensors(dense, stored_names(files, config))
    place = functools.partial(_placed, device=device, dtype=dtype)
    tensors = read_tensors(files, dtype, place, _floats_of(dense))
    try:
        return decoder_of(tensors, dense, dtype)
    except (ValueError, IndexError) as error:
        raise OtherDecoderError(str(error)) from error


def decoder_of(tensors: Mapping[str, Weight], dense: DecoderConfig, dtype: torch.dtype) -> DecoderWeights:
    """Build a decoder from tensors on their device. Raises ValueError or IndexError if they do not fit the config."""
    layers = [_layer(tensors, number, dense, dtype) for number in range(dense.num_layers)]
    head_bias = plain(tensors[HEAD_BIAS]) if dense.has_head_bias else None
    head = linear_from(tensors[EMBEDDING if dense.is_tied else HEAD], head_bias)
    final_norm = _norm(tensors, dense.form.final_norm, dense)
    table = _ple_table(tensors[PLE_TABLE], dtype) if dense.ple_dim else None
    streams = None if dense.streams is None else stream_weights(tensors, STREAMS_OF_HEAD)
    sizes = _sizes(dense, dtype, table)
    return DecoderWeights(sizes, tensors[EMBEDDING], layers, final_norm, head, dense.rotary, table, streams)


def layer_alone(
    tensors: Mapping[str, Weight], dense: DecoderConfig, dtype: torch.dtype
) -> tuple[DecoderSizes, LayerWeights]:
    """Build the layer of a one-layer model. Raises ValueError or IndexError if tensors do not fit the config."""
    kept = _floats_of(dense)
    placed = {name: each if name in kept else _placed(each, CPU, dtype) for name, each in tensors.items()}
    return _sizes(dense, dtype), _layer(placed, 0, dense, dtype)


def _sizes(dense: DecoderConfig, dtype: torch.dtype, ple_table: Weight | None = None) -> DecoderSizes:
    scales: dict[str, Any] = {name: dense.scales[name] for name in SCALES_WITHIN if name in dense.scales}
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
        norms_after_rope=dense.form.norms_after_rope,
        is_parallel=dense.form.is_parallel,
        qk_norms_differ=dense.form.qk_norms_differ,
        gates_heads=dense.form.gates_heads,
        norms_values=dense.form.norms_values,
        score_softcap=dense.caps.get("scores", 0.0),
        logit_softcap=dense.caps.get("logits", 0.0),
        latent=None if dense.latent is None else dense.latent.sizes,
        gate_limit=0.0 if dense.experts is None else dense.experts.gate_limit,
        gate_slope=0.0 if dense.experts is None else dense.experts.gate_slope,
        value_dim=dense.value_dim,
        streams=dense.streams,
        **({} if ple_table is None else _ple_sizes(dense, dtype, ple_table)),
        **scales,
    )


def _placed(weight: Weight, device: torch.device, dtype: torch.dtype) -> Weight:
    if isinstance(weight, PackedMatrix):
        return weight.to(device)
    return weight.to(device).to(dtype)  # this order moves fewer bytes if the file's type is narrower


def _embedding_scale(dense: DecoderConfig, dtype: torch.dtype) -> float:
    if dense.form.scales_by_width:
        return _rounded(dense.hidden**0.5, dtype)
    return dense.scales.get("embedding", 1.0)


def _ple_sizes(dense: DecoderConfig, dtype: torch.dtype, table: Weight) -> dict[str, Any]:
    return {"ple_dim": dense.ple_dim, "ple_scale": _rounded(dense.ple_dim**0.5, dtype), "ple_dtype": table.dtype}


def _rounded(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number).to(dtype))


def stored_names(files: ModelFiles, config: dict[str, Any]) -> set[str]:
    """Return the names of a text model's tensors, without a tied head. The set is empty if a tensor is stored twice."""
    layout = stored_layout(files.name, files.path)
    return set() if layout.repeated else {name for name in layout.heads if is_of_text(name, config)}


def _floats_of(dense: DecoderConfig) -> frozenset[str]:
    """Return the tensors that stay as they are stored, whatever the model's dtype."""
    table = frozenset({PLE_TABLE} if dense.ple_dim else ())  # large, so no wider than it is stored
    layers = range(dense.num_layers)
    if dense.streams is not None:
        table |= {f"{STREAMS_OF_HEAD}{part}" for part in STREAM_PARTS.values()}
        prefixes = [f"model.layers.{number}.{part}" for number in layers for part in STREAMS.values()]
        table |= {f"{prefix}{part}" for prefix in prefixes for part in STREAM_PARTS.values()}
    if isinstance(dense.latent, CompressedConfig):
        table |= {f"model.layers.{number}.{name}" for number in layers for name in dense.latent.floats(number)}
    if dense.experts is None:
        return table
    experts = dense.experts.names
    names = (experts.router, experts.router_bias, experts.choice_bias, experts.choices, dense.form.sinks)
    return table | {f"model.layers.{number}.{name}" for number in layers for name in names if name is not None}


def _layer(tensors: Mapping[str, Weight], number: int, dense: DecoderConfig, dtype: torch.dtype) -> LayerWeights:
    prefix = f"model.layers.{number}."
    parts, widths = _parts(dense.linears(number)), dense.widths(number)
    linears: dict[str, Any] = {}
    linears |= {role: each for part in parts.items() for role, each in _linears(tensors, prefix, part, widths)}
    if dense.keys_are_values and number in dense.own_layers:
        linears["value"] = linears["key"]
    norms: dict[str, Any] = {role: _norm(tensors, prefix + part, dense) for role, part in dense.norms(number).items()}
    view: dict[str, Any] = {"is_nope": number in dense.nope_layers, "window": dense.windows[number]}
    view |= {"heads": dense.heads(number), "shared_keys": dense.shared_keys.get(number)}
    if number in dense.attending:
        norms |= {role: _qk_norm(tensors, prefix + part, dense) for role, part in dense.head_norms(number).items()}
        linears = _attention(tensors, number, linears, norms, dense)
    if dense.streams is not None:
        view |= {name: stream_weights(tensors, prefix + part) for name, part in STREAMS.items()}
    if dense.ple_dim:
        view |= _ple(tensors, number, dense)
    view["rotary"] = dense.other_rotary if number in dense.other_layers else None
    view["curve"] = _curve([plain(tensors[prefix + part]) for part in dense.form.curve])
    if dense.form.layer_scale is not None:
        view["layer_scale"] = plain(tensors[prefix + dense.form.layer_scale]).float()
    if (sinks := dense.sinks(number)) is not None:
        view["sinks"] = plain(tensors[prefix + sinks]).float()
    if dense.experts is not None and number in dense.experts.layers:
        view["experts"] = expert_weights(tensors, prefix, dense.experts, dtype)
        if (shared_norm := dense.experts.names.norms.get(SHARED_NORM)) is not None:
            norms[SHARED_NORM] = _norm(tensors, prefix + shared_norm, dense)
    if dense.mixer is not None and number in dense.mixer.layers:
        view["mixer"] = recurrent_weights(tensors, prefix, dense.mixer, dtype)
    absent: dict[str, Any] = dict.fromkeys((*ATTENTION, *ROLES))
    return LayerWeights(**absent | norms | view | linears)


def _attention(
    tensors: Mapping[str, Weight],
    number: int,
    linears: dict[str, Any],
    norms: Mapping[str, Tensor],
    dense: DecoderConfig,
) -> dict[str, Any]:
    """Return a layer's linear layers and other parts of its attention, arranged for the kernels."""
    prefix = f"model.layers.{number}."
    if isinstance(dense.latent, CompressedConfig):
        if (found := len(norms["key_norm"])) != dense.head_dim:
            raise ValueError(f"found a norm of keys of {found}, expected {dense.head_dim}")
        key_norm = norms["key_norm"][dense.latent.order(dense.head_dim)]
        return compressed_weights(tensors, prefix, number, linears, dense.latent) | {"key_norm": key_norm}
    if dense.latent is None:
        return linears | _heads(linears, dense)
    indexer = indexer_weights(tensors, prefix, dense.latent) if number in dense.latent.indexed_layers else {}
    return latent_linears(linears, dense.latent) | indexer


def _heads(linears: Mapping[str, AnyLinear], dense: DecoderConfig) -> dict[str, AnyLinear]:
    """Arrange queries and keys in the kernels' order, and split gates from queries."""
    found = {role: linears[role] for role in ("query", "key", *BLOCK_LINEARS) if role in linears}
    if dense.form.gates_heads and "query" in found:
        dim, query = dense.head_dim, found["query"]
        found["query"] = of_heads(query, list(range(dim)), 2 * dim)
        found["head_gate"] = of_heads(query, list(range(dim, 2 * dim)), 2 * dim)
    if (order := dense.head_order) is not None:
        found |= {role: of_heads(each, order, dense.head_dim) for role, each in found.items() if role != "head_gate"}
    return found


def rows_by_role(
    rows: Tensor, name: str, roles: Sequence[str], number: int, dense: DecoderConfig
) -> dict[str, AnyLinear]:
    """Return the rows of a layer's stored linear layer by role, in the kernels' order. Raises ValueError."""
    stored = {f"{name}.weight": rows}
    linears = dict(_linears(stored, "", (name, [*roles]), dense.widths(number)))
    return linears | _heads(linears, dense)


def _ple_table(stored: Weight, dtype: torch.dtype) -> Weight:
    """Return the table of per-layer embeddings: bf16 numbers stay bf16, because models in float32 read the same."""
    return stored if isinstance(stored, PackedMatrix) or stored.dtype == torch.bfloat16 else stored.to(dtype)


def _ple(tensors: Mapping[str, Weight], number: int, dense: DecoderConfig) -> dict[str, Any]:
    """Return a layer's part of per-layer embeddings. Raises ValueError for rows that are not those of all layers."""
    prefix, first = f"model.layers.{number}.", number * dense.ple_dim
    linears = {role: tensors[f"{prefix}{name}.weight"] for role, name in PLE_LINEARS.items()}
    projection = tensors[f"{PLE_OF_ALL['ple_projection']}.weight"]
    if projection.shape[0] != (expected := dense.num_layers * dense.ple_dim):
        raise ValueError(f"found {projection.shape[0]} rows of {PLE_OF_ALL['ple_projection']}, expected {expected}")
    linears["ple_projection"] = of_rows(projection, list(range(first, first + dense.ple_dim)))
    return {role: linear_from(weight) for role, weight in linears.items()} | {
        "ple_norm": _norm(tensors, PLE_OF_ALL["ple_norm"], dense),
        "ple_output_norm": _norm(tensors, prefix + PLE_OUTPUT_NORM, dense),
    }


def _norm(tensors: Mapping[str, Weight], part: str, dense: DecoderConfig) -> Tensor:
    """Return a norm's weights, followed by its biases if it has any."""
    found = [plain(tensors[name]) for name in dense.form.norm_tensors(part)]
    return found[0] if len(found) == 1 else torch.cat(found)


def _qk_norm(tensors: Mapping[str, Weight], part: str, dense: DecoderConfig) -> Tensor:
    """Return the weights of a norm of heads, in the kernels' order of dimensions."""
    weight = plain(tensors[f"{part}.weight"]).flatten()
    if (order := dense.head_order) is None:
        return weight
    if len(weight) % dense.head_dim:
        raise ValueError(f"found {len(weight)} weights of {part}, expected one for each dimension of a head")
    return weight.view(-1, dense.head_dim)[:, order].flatten()


def _curve(trained: list[Tensor]) -> Tensor | None:
    """Return the parameters of XIELU, or None for another activation."""
    if not trained:
        return None
    squares, exponentials, share, bound = (number.flatten() for number in trained)
    found: list[Tensor] = [softplus(squares), share + softplus(exponentials), share, bound]
    return torch.cat(found).float()


def _parts(names: Mapping[str, str]) -> dict[str, list[str]]:
    parts: dict[str, list[str]] = {}
    for role, part in names.items():
        parts.setdefault(part, []).append(role)
    return parts


def _linears(
    tensors: Mapping[str, Weight], prefix: str, part: tuple[str, list[str]], rows: Mapping[str, int]
) -> Iterator[tuple[str, AnyLinear]]:
    name, roles = part
    stored = tensors[f"{prefix}{name}.weight"], tensors.get(f"{prefix}{name}.bias")
    return split_rows(name, roles, stored, [rows[role] for role in roles if len(roles) > 1 or role in ("gate", "up")])
