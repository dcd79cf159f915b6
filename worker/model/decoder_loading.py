"""A decoder's weights from the tensors in a model's files."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from swiftbatch.jobs.start_times import timed
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes, DecoderWeights, ExpertWeights, LayerWeights
from swiftbatch.worker.kernels.layer_specs import RecurrentForm, RecurrentWeights
from swiftbatch.worker.kernels.quantized_weights import (
    AnyLinear,
    Linear,
    PackedExperts,
    PackedMatrix,
    Weight,
    linear_from,
    plain,
)
from swiftbatch.worker.model.architectures.attention_layers import (
    BLOCK_LINEARS,
    INDEX_LINEARS,
    INDEX_NORM,
    UP,
    MLAConfig,
)
from swiftbatch.worker.model.architectures.moe_layers import ROLES, SHARED_NORM, FusedNames, MoEConfig
from swiftbatch.worker.model.architectures.recurrent_layers import RecurrentConfig
from swiftbatch.worker.model.architectures.spec import ATTENTION, PLE_LINEARS, PLE_OF_ALL, PLE_OUTPUT_NORM, PLE_TABLE
from swiftbatch.worker.model.decoder_config import (
    DecoderConfig,
    OtherDecoderError,
    read_decoder_config,
    refuse_other_tensors,
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
    choice_bias = _floats(tensors, prefix, names.choice_bias)
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
        **{role: _floats(tensors, prefix, name) for role, name in names.scales.items()},
        **{role: plain(tensors[f"{prefix}{norm}.weight"]) for role, norm in names.norms.items() if role != SHARED_NORM},
    )
    if (widths := (found.intermediate, found.latent_width)) != (expected := (config.width, config.latent_width)):
        raise ValueError(f"found experts of widths {widths}, expected {expected}")
    return found


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


# A model's layers with a state, a convolution or latent attention, from their stored tensors.


def recurrent_weights(
    tensors: Mapping[str, Weight], prefix: str, mixer: RecurrentConfig, dtype: torch.dtype
) -> RecurrentWeights:
    """Collect the weights of a layer's mixer. Raises ValueError for tensors of unexpected sizes."""
    linears = dict(_mixer_linears(tensors, f"{prefix}{mixer.spec.part}.", mixer))
    stored = {role: plain(tensors[prefix + name]) for role, name in mixer.numbers.items()}
    numbers = {role: _number(role, each.to(dtype).float(), mixer) for role, each in stored.items()}
    if mixer.part_scales is not None:
        numbers["scales"] = _scales(mixer.part_scales, mixer).to(dtype).float()
    return RecurrentWeights(mixer.sizes, linears, numbers)


def _mixer_linears(
    tensors: Mapping[str, Weight], prefix: str, mixer: RecurrentConfig
) -> Iterator[tuple[str, AnyLinear]]:
    columns = mixer.sizes.columns()
    for name, roles in mixer.spec.linears.items():
        weight, bias = tensors[f"{prefix}{name}.weight"], tensors.get(f"{prefix}{name}.bias")
        if (order := mixer.spec.orders.get(name)) is not None:
            weight = of_rows(weight, order(mixer.shape))
        yield from _split(name, roles, (weight, bias), [columns[role] for role in roles if len(roles) > 1])


def of_rows(weight: Weight, rows: list[int]) -> Weight:
    """Return some rows of a stored matrix. Raises ValueError for rows that it does not have."""
    if len(rows) > weight.shape[0] or max(rows) >= weight.shape[0]:
        raise ValueError(f"found {weight.shape[0]} rows, expected {len(rows)}")
    chosen = torch.tensor(rows, device=weight.device)
    return weight.rows(chosen) if isinstance(weight, PackedMatrix) else weight[chosen]


def _scales(parts: tuple[float, ...], mixer: RecurrentConfig) -> Tensor:
    gates, values, keys, queries, steps = parts
    width, key_width = mixer.sizes.width, mixer.shape.num_key_heads * mixer.shape.key_dim
    runs = ((values, width), (keys, key_width), (queries, key_width), (gates, width), (steps, mixer.shape.num_heads))
    return torch.cat([torch.full((count,), scale) for scale, count in runs])


def _number(role: str, numbers: Tensor, mixer: RecurrentConfig) -> Tensor:
    """Arrange a float32 parameter for the kernels. Raises ValueError for an unexpected shape."""
    sizes = mixer.sizes
    if role == "taps":
        _refuse_shape(role, numbers, (sizes.num_channels, 1, sizes.conv_width), (sizes.num_channels, sizes.conv_width))
        return numbers.flatten(1).T.contiguous()
    if role == "norm" and sizes.form == RecurrentForm.DELTA_NET:
        _refuse_shape(role, numbers, (sizes.norm_width,))
        return numbers.repeat(sizes.width // sizes.norm_width)
    return numbers


def _refuse_shape(role: str, numbers: Tensor, *expected: tuple[int, ...]) -> None:
    if tuple(numbers.shape) not in expected:
        raise ValueError(f"found {role} of a mixer as {list(numbers.shape)}, expected {list(expected[0])}")


def latent_linears(linears: Mapping[str, AnyLinear], latent: MLAConfig) -> dict[str, AnyLinear]:
    """Arrange latent attention's projections for the kernels. Raises ValueError if rows are not whole heads.

    Each head's up-projection of keys is transposed, because the kernels apply it to the head's query.
    """
    sizes = latent.sizes
    heads = range(0, linears["query"].weight.shape[0], sizes.query_dim)
    of_queries = [*range(sizes.nope_dim), *(sizes.nope_dim + each for each in latent.turned_order)]
    of_key = [*range(sizes.rank), *(sizes.rank + each for each in latent.turned_order)]
    query, key = (linears[role].weight for role in ("query", "key"))
    if key.shape[0] != sizes.key_dim:
        raise ValueError(f"found {key.shape[0]} rows of latent vectors, expected {sizes.key_dim}")
    up, width = plain(linears[UP].weight), sizes.nope_dim + sizes.value_dim
    if up.shape[0] != len(heads) * width:
        raise ValueError(f"found {up.shape[0]} rows of keys and values, expected {len(heads)} heads of {width}")
    up = up.unflatten(0, (len(heads), width))
    keys, values = up.split([sizes.nope_dim, sizes.value_dim], dim=1)  # [num_heads, -, rank]
    return {role: linear for role, linear in linears.items() if role != UP} | {
        "query": linear_from(of_rows(query, [head + each for head in heads for each in of_queries])),
        "key": linear_from(of_rows(key, of_key)),
        "key_up": Linear(keys.transpose(1, 2).flatten(0, 1)),
        "value_up": Linear(values.flatten(0, 1)),
    }


def _refuse_endless(tensors: Mapping[str, Weight], names: Iterable[str]) -> None:
    """Raise ValueError for parts of an indexer that are not finite: they only choose keys, so logits stay finite."""
    for name in names:
        if not plain(tensors[name]).isfinite().all():
            raise ValueError(f"found numbers in {name} that are not finite")


def indexer_weights(tensors: Mapping[str, Weight], prefix: str, latent: MLAConfig) -> dict[str, Any]:
    """Arrange a layer's indexer for the kernels. Raises ValueError for tensors of unexpected sizes or damaged ones."""
    assert latent.sizes.indexer is not None
    order, dim = latent.index_order, latent.sizes.indexer.dim
    names = {role: f"{prefix}{name}.weight" for role, name in INDEX_LINEARS.items()}
    norms = [f"{prefix}{INDEX_NORM}.{part}" for part in ("weight", "bias")]
    found: dict[str, Any] = {role: linear_from(tensors[name]) for role, name in names.items()}
    norm = [plain(tensors[name]) for name in norms]
    if any(part.shape != (dim,) for part in norm):
        raise ValueError(f"found norms of indexers of {norm[0].numel()} and {norm[1].numel()}, expected {dim}")
    found |= {role: _of_heads(found[role], order, dim) for role in ("index_query", "index_key")}
    return found | {"index_norm": torch.cat([part[order] for part in norm])}


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
    return DecoderWeights(
        _sizes(dense, dtype, table), tensors[EMBEDDING], layers, final_norm, head, dense.rotary, table
    )


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
    if dense.experts is None:
        return table
    experts = dense.experts.names
    names = (experts.router, experts.router_bias, experts.choice_bias, dense.form.sinks)
    layers = range(dense.num_layers)
    return table | {f"model.layers.{number}.{name}" for number in layers for name in names if name is not None}


def _layer(tensors: Mapping[str, Weight], number: int, dense: DecoderConfig, dtype: torch.dtype) -> LayerWeights:
    prefix = f"model.layers.{number}."
    parts, widths = _parts(dense.linears(number)), dense.widths(number)
    linears: dict[str, Any] = {}
    linears |= {role: each for part in parts.items() for role, each in _linears(tensors, prefix, part, widths)}
    if dense.keys_are_values and number in dense.own_layers:
        linears["value"] = linears["key"]
    norms: dict[str, Any] = {role: _norm(tensors, prefix + part, dense) for role, part in dense.norms(number).items()}
    if number in dense.attending:
        norms |= {role: _qk_norm(tensors, prefix + part, dense) for role, part in dense.head_norms(number).items()}
        linears = (
            latent_linears(linears, dense.latent) if dense.latent is not None else linears | _heads(linears, dense)
        )
    _refuse_endless(tensors, [prefix + part for part in dense.index_tensors(number)])
    if dense.latent is not None and number in dense.latent.indexed_layers:
        linears |= indexer_weights(tensors, prefix, dense.latent)
    view: dict[str, Any] = {"is_nope": number in dense.nope_layers, "window": dense.windows[number]}
    view |= {"heads": dense.heads(number), "shared_keys": dense.shared_keys.get(number)}
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
    return LayerWeights(**absent | linears, **norms, **view)


def _heads(linears: Mapping[str, AnyLinear], dense: DecoderConfig) -> dict[str, AnyLinear]:
    """Arrange queries and keys in the kernels' order, and split gates from queries."""
    found = {role: linears[role] for role in ("query", "key", *BLOCK_LINEARS) if role in linears}
    if dense.form.gates_heads and "query" in found:
        dim, query = dense.head_dim, found["query"]
        found["query"] = _of_heads(query, list(range(dim)), 2 * dim)
        found["head_gate"] = _of_heads(query, list(range(dim, 2 * dim)), 2 * dim)
    if (order := dense.head_order) is not None:
        found |= {role: _of_heads(each, order, dense.head_dim) for role, each in found.items() if role != "head_gate"}
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
    return _split(name, roles, stored, [rows[role] for role in roles if len(roles) > 1 or role in ("gate", "up")])


def _split(
    name: str, roles: Sequence[str], stored: tuple[Weight, Weight | None], widths: list[int]
) -> Iterator[tuple[str, AnyLinear]]:
    """Split a stored linear layer among its roles. Raises ValueError for other `widths`, if any are given."""
    weight, bias = stored[0], None if stored[1] is None else plain(stored[1])
    if widths and any(each.shape[0] != sum(widths) for each in (weight, bias) if each is not None):
        raise ValueError(f"found rows of {name} that are not those of {roles}")
    if len(roles) == 1:
        yield roles[0], linear_from(weight, bias)
        return
    biases = [None] * len(roles) if bias is None else bias.split(widths)
    yield from zip(roles, map(linear_from, weight.split(widths), biases), strict=True)


def _of_heads(linear: AnyLinear, dims: list[int], width: int) -> AnyLinear:
    """Return some dimensions of each head of `width` rows. Raises ValueError if rows are not whole heads."""
    rows = [head + dim for head in range(0, linear.weight.shape[0], width) for dim in dims]
    if not rows:
        raise ValueError("found 0 rows, expected those of heads")
    bias = None if linear.bias is None else linear.bias[torch.tensor(rows, device=linear.bias.device)]
    return linear_from(of_rows(linear.weight, rows), bias)
