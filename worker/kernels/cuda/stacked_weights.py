"""Weights of a decoder for GPU kernels: fused QKV, fused gate and up, stacked experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from swiftbatch.worker.kernels.cuda.lora_kernels import StackedAdapters, stacked_adapters
from swiftbatch.worker.kernels.cuda.ple_kernels import LayerPLE, StackedPLE
from swiftbatch.worker.kernels.cuda.repacked_weights import is_multiplied_packed, repacked
from swiftbatch.worker.kernels.decoder_weights import (
    AdapterWeights,
    DecoderSizes,
    DecoderWeights,
    ExpertWeights,
    LayerWeights,
    MayBeLatent,
)
from swiftbatch.worker.kernels.kernel_sizes import LayerHeads
from swiftbatch.worker.kernels.layer_specs import (
    RecurrentForm,
    RecurrentSizes,
    RecurrentWeights,
    Routing,
    recurrent_float_shapes,
)
from swiftbatch.worker.kernels.quantized_weights import (
    AnyLinear,
    Linear,
    PackedMatrix,
    Weight,
    linear_from,
    plain,
    stacked,
)
from swiftbatch.worker.kernels.rope_scaling import Rotary


@dataclass(frozen=True)
class StackedExperts(MayBeLatent):
    """Experts of a layer; `gate_up` alternates rows of gate and up projections, or has only up projections.

    `router [num_experts, hidden] float32` has an additional row for the gate of the shared expert. Norms and scales are
    those of `ExpertWeights`.
    """

    routing: Routing
    router: Tensor
    gate_up: AnyLinear  # [num_experts * 2 * intermediate, hidden], or half as many rows
    down: AnyLinear  # [num_experts * hidden, intermediate]
    router_bias: Tensor | None = None  # [num_experts] float32
    choice_bias: Tensor | None = None  # as `router_bias`
    gate_limit: float = 0.0
    gate_slope: float = 0.0
    has_gates: bool = True
    latent: tuple[AnyLinear, AnyLinear] | None = None
    router_scale: Tensor | None = None
    choice_scales: Tensor | None = None
    front_norm: Tensor | None = None
    behind_norm: Tensor | None = None
    first: int = 0  # expert, of those that one of several GPUs has
    num_own: int = 0

    @property
    def intermediate(self) -> int:
        return self.down.weight.shape[1]

    @property
    def has_share(self) -> bool:
        return len(self.router) > self.routing.num_experts


def stacked_experts(experts: ExpertWeights, device: torch.device) -> StackedExperts:
    """Copy experts to the device. Raises ValueError if only some have a bias."""
    router = [each for each in (experts.router.weight, experts.shared_gate) if each is not None]
    floats = (experts.router.bias, experts.choice_bias, experts.router_scale, experts.choice_scales)
    router_bias, choice_bias, router_scale, choice_scales = (_moved_if_any(each, device) for each in floats)
    in_front = [part for part in (experts.gates, experts.ups) if part]
    latent = None if experts.latent is None else [_in_turns(([each],), device) for each in experts.latent]
    return StackedExperts(
        experts.routing,
        torch.cat([each.detach().to(device) for each in router]),
        _in_turns(in_front, device),
        _in_turns((experts.downs,), device),
        router_bias,
        choice_bias,
        experts.gate_limit,
        experts.gate_slope,
        bool(experts.gates),
        None if latent is None else (latent[0], latent[1]),
        router_scale,
        choice_scales,
        _moved_if_any(experts.front_norm, device),
        _moved_if_any(experts.behind_norm, device),
        num_own=len(experts.ups),
    )


def _in_turns(parts: Sequence[Sequence[AnyLinear]], device: torch.device) -> AnyLinear:
    """Stack by expert, alternating the rows of each part."""
    biases = [[linear.bias for linear in part if linear.bias is not None] for part in parts]
    found, whole = sum(map(len, biases)), sum(map(len, parts))
    if found not in (0, whole):
        raise ValueError(f"found {found} biases of experts, expected {whole} or none")
    weight = _weights_in_turns([[linear.weight for linear in part] for part in parts], device)
    return linear_from(weight, _tensor_in_turns(biases, device) if found else None)


def _weights_in_turns(parts: list[list[Weight]], device: torch.device) -> Weight:
    packed = [[each for each in part if isinstance(each, PackedMatrix)] for part in parts]
    all_packed = [each for part in packed for each in part]
    is_packed = len(all_packed) == sum(map(len, parts)) and len({each.form for each in all_packed}) == 1
    if not is_packed or not all(map(is_multiplied_packed, all_packed)):
        return _tensor_in_turns([[plain(each) for each in part] for part in parts], device)
    offsets = [[each.offsets for each in part if each.offsets is not None] for part in packed]
    whole = PackedMatrix(
        all_packed[0].code,
        _tensor_in_turns([[each.codes for each in part] for part in packed], device),
        _tensor_in_turns([[each.scales for each in part] for part in packed], device),
        all_packed[0].dtype,
        _tensor_in_turns(offsets, device) if offsets[0] else None,
    )
    return repacked(whole)


def _tensor_in_turns(parts: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """Copy each tensor directly to its final place, since a layer's experts may take gigabytes."""
    first = parts[0][0]
    size = (len(parts[0]), len(first), len(parts), *first.shape[1:])
    whole = torch.empty(size, dtype=first.dtype, device=device)
    for number, part in enumerate(parts):
        for expert, tensor in enumerate(part):
            whole[expert, :, number] = tensor.detach()
    return whole.flatten(0, 2)


# Weights of a decoder for CUDA kernels; projections of the same input are stacked.


@dataclass(frozen=True)
class StackedIndexer:
    """Projections and the norm of an indexer."""

    query: AnyLinear  # [num_index_heads * index_dim, query_rank]
    narrow: AnyLinear  # computes a row's key, then the weights of heads
    norm: Tensor  # [2 * index_dim], biases last


def stacked_indexer(layer: LayerWeights, device: torch.device) -> StackedIndexer | None:
    """Copy to the device. Returns None for a layer without an indexer."""
    if layer.index_query is None or layer.index_key is None or layer.index_weight is None or layer.index_norm is None:
        return None
    narrow = _stacked([layer.index_key, layer.index_weight], device)
    return StackedIndexer(_stacked([layer.index_query], device), narrow, _moved(layer.index_norm, device))


@dataclass(frozen=True)
class StackedMLA:
    """Projections and norms within latent attention. Weights of projections per head are not packed."""

    query: AnyLinear | None
    query_norm: Tensor | None
    key_norm: Tensor  # [rank]
    key_up: Tensor  # [num_heads * rank, nope_dim]
    value_up: Tensor  # [num_heads * value_dim, rank]
    indexer: StackedIndexer | None = None

    @property
    def products(self) -> list[AnyLinear]:
        """Return all projections except those per head."""
        of_indexer = [] if self.indexer is None else [self.indexer.query, self.indexer.narrow]
        return [*([] if self.query is None else [self.query]), *of_indexer]


def stacked_latent(layer: LayerWeights, query: AnyLinear | None, device: torch.device) -> StackedMLA | None:
    """Copy to the device, where `query` already is. Returns None for a layer without latent attention."""
    if layer.key_up is None or layer.value_up is None or layer.key_norm is None:
        return None
    key_up, value_up = (plain(each.weight).detach().to(device).contiguous() for each in (layer.key_up, layer.value_up))
    query_norm = None if layer.query_norm is None else layer.query_norm.detach().to(device)
    indexer = stacked_indexer(layer, device)
    return StackedMLA(query, query_norm, layer.key_norm.detach().to(device), key_up, value_up, indexer)


def wide_columns(sizes: RecurrentSizes) -> int:
    """Return the number of columns of a mixer's `wide`."""
    return sum(sizes.columns()[role] for role in _wide_roles(sizes))


def _wide_roles(sizes: RecurrentSizes) -> tuple[str, ...]:
    """Return the roles of the projections that are stacked as `wide`."""
    return ("inputs", "gates", "betas") if sizes.form == RecurrentForm.CONVOLUTION else ("inputs", "gates")


@dataclass(frozen=True)
class StackedRecurrentLayer:
    """Products of a mixer, stacked: those of channels, those of heads, and the output."""

    sizes: RecurrentSizes
    wide: AnyLinear  # computes inputs, gates, and in pure convolutions the gates of inputs
    narrow: AnyLinear | None  # computes one or two numbers per head
    output: AnyLinear
    floats: dict[str, Tensor]  # `rates` determine the decays
    scales: tuple[Tensor, Tensor] | None = None  # factors of the columns of `wide` and `narrow`

    @property
    def products(self) -> list[AnyLinear]:
        return [self.wide, self.output, *([] if self.narrow is None else [self.narrow])]


def stacked_recurrent_layer(mixer: RecurrentWeights, device: torch.device) -> StackedRecurrentLayer:
    """Copy a mixer's weights to a device, stacked. Raises ValueError for other shapes than `sizes` has."""
    sizes, linears = mixer.sizes, mixer.linears
    for role, numbers, shape in recurrent_float_shapes(mixer):
        if numbers is not None and tuple(numbers.shape) != shape:
            raise ValueError(f"found {role} as {list(numbers.shape)}, expected {list(shape)}")
    floats = {role: numbers.detach().float().to(device).contiguous() for role, numbers in mixer.floats.items()}
    scales, num_wide = floats.pop("scales", None), wide_columns(sizes)
    if scales is not None:
        scales = scales.to(linears["output"].weight.dtype)
    if "rates" in floats:
        floats["rates"] = floats["rates"].exp()
    heads = ("betas", "steps") if sizes.form == RecurrentForm.DELTA_NET else ("steps",)
    return StackedRecurrentLayer(
        sizes,
        _stacked([linears[role] for role in _wide_roles(sizes)], device),
        None if sizes.form == RecurrentForm.CONVOLUTION else _stacked([linears[role] for role in heads], device),
        _stacked([linears["output"]], device),
        floats,
        None if scales is None else (scales[:num_wide], scales[num_wide:]),
    )


@dataclass(frozen=True)
class SharedDepths:
    """Depths of a whole layer's products, of which each of several GPUs has a part."""

    output: int
    down: int


@dataclass(frozen=True)
class StackedLayer:
    """One layer; `query_key_value` and `gate_up` are stacked in this order, with gates of heads after values.

    An indexer's queries and key, of blocks, come last. Without projections of values, values are keys before their norm
    and rotation. `heads`, `shared_keys`, `shared_norm` and `layer_scale` are as in `LayerWeights`. In latent attention,
    `query_key_value` computes the queries or their latent vector, and the latent vector to store.
    """

    query_key_value: AnyLinear | None
    output: AnyLinear | None
    gate_up: AnyLinear | None  # or up projections alone
    down: AnyLinear | None
    input_norm: Tensor | None  # [hidden], twice as wide with biases, as are the following norms
    output_norm: Tensor | None
    mlp_norm: Tensor | None
    down_norm: Tensor | None
    qk_norms: tuple[Tensor, Tensor] | None  # for queries and for keys, if there are any: [head_dim], or per head
    joint_norms: Tensor | None  # for all queries of a row, then for all its keys
    index_norms: tuple[Tensor, Tensor] | None = None  # as `qk_norms`, of an indexer of blocks
    is_nope: bool = False
    rotary: Rotary | None = None
    window: int | None = None
    curve: Tensor | None = None
    sinks: Tensor | None = None
    experts: StackedExperts | None = None
    latent: StackedMLA | None = None
    mixer: StackedRecurrentLayer | None = None
    heads: LayerHeads | None = None
    num_stored: int = 2  # projections of keys and values
    shared_keys: int | None = None
    shared_norm: Tensor | None = None
    layer_scale: float | None = None
    ple: LayerPLE | None = None
    shared: SharedDepths | None = None
    adapters: Mapping[str, StackedAdapters] = field(default_factory=dict)  # by the product that they add to

    @property
    def attention(self) -> tuple[AnyLinear, AnyLinear] | None:
        return None if self.query_key_value is None or self.output is None else (self.query_key_value, self.output)

    @property
    def keeps_keys(self) -> bool:
        return self.attention is not None and self.shared_keys is None

    @property
    def products(self) -> list[AnyLinear]:
        """Return all projections except those of experts and those per head in latent attention."""
        within = [] if self.latent is None else self.latent.products
        within += [] if self.mixer is None else self.mixer.products
        within += [] if self.ple is None else self.ple.products
        around_experts = () if self.experts is None else self.experts.latent or ()
        return [*(self.attention or ()), *within, *around_experts, *(self.dense_mlp or ())]

    @property
    def dense_mlp(self) -> tuple[AnyLinear, AnyLinear] | None:
        return None if self.gate_up is None or self.down is None else (self.gate_up, self.down)


@dataclass(frozen=True)
class StackedWeights:
    """Dense decoder on a device: `embedding [vocab, hidden]`, layers, norm, head."""

    sizes: DecoderSizes
    embedding: Tensor
    layers: list[StackedLayer]
    final_norm: Tensor
    head: AnyLinear  # of tokens from `first_token` on
    rotary: Rotary
    first_token: int = 0
    ple: StackedPLE | None = None

    @property
    def products(self) -> list[AnyLinear]:
        of_all = [self.head] if self.ple is None else [self.ple.projection, self.head]
        return [*(product for layer in self.layers for product in layer.products), *of_all]

    @property
    def product_bytes(self) -> int:
        experts = [layer.experts for layer in self.layers if layer.experts is not None]
        of_experts = sum(each.gate_up.weight.nbytes + each.down.weight.nbytes for each in experts)
        return of_experts + sum(product.weight.nbytes for product in self.products)

    @property
    def is_packed(self) -> bool:
        """Return whether a projection outside experts has packed weights."""
        return any(isinstance(product.weight, PackedMatrix) for product in self.products)

    @property
    def gains_by_few_rows(self) -> bool:
        """Return whether forwards of few rows cost less: packed weights, and kernels without tiles of 64 rows."""
        is_dense = all(layer.experts is None and layer.mixer is None for layer in self.layers)
        return self.is_packed and is_dense and self.sizes.latent is None


def handed_over(weights: DecoderWeights) -> Iterator[LayerWeights]:
    """Yield the layers and remove them from `weights`, so that only a few layers are in memory twice."""
    while weights.layers:
        yield weights.layers.pop(0)


def stacked_weights(
    weights: DecoderWeights, device: torch.device, layers: Iterable[LayerWeights] | None = None
) -> StackedWeights:
    """Copy stacked weights; move the rest only if needed. A tied embedding and head stay one tensor."""
    embedding = _moved(plain(weights.embedding), device)
    is_tied = isinstance(weights.embedding, Tensor) and weights.head.weight is weights.embedding
    head = Linear(embedding, weights.head.bias) if is_tied else weights.head
    stacked_layers, projections = list[StackedLayer](), list[AnyLinear]()
    for layer in weights.layers if layers is None else layers:
        stacked_layers.append(stacked_layer(layer, device, weights.sizes.joins_heads))
        projections += [] if layer.ple_projection is None else [layer.ple_projection]
    ple = None
    if weights.ple_table is not None:
        ple = StackedPLE(_stacked(projections, device), _moved(plain(weights.ple_table), device))
    final_norm = _moved(weights.final_norm, device)
    return StackedWeights(
        weights.sizes, embedding, stacked_layers, final_norm, _stacked([head], device), weights.rotary, ple=ple
    )


def with_adapters(weights: StackedWeights, adapters: Sequence[AdapterWeights]) -> StackedWeights:
    """Copy LoRA adapters to the device, numbered from 1 on."""
    sizes, layers = weights.sizes, list[StackedLayer]()
    queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    starts = {"query": 0, "key": queries, "value": queries + keys, "head_gate": queries + 2 * keys, "gate": 0}
    for number, layer in enumerate(weights.layers):
        width = layer.dense_mlp[1].weight.shape[1] if layer.dense_mlp and sizes.has_gates else 0
        own = starts | {"output": 0, "up": width, "down": 0}
        stacked = stacked_adapters([each.layers[number] for each in adapters], own, weights.embedding.device)
        layers.append(replace(layer, adapters=stacked))
    return replace(weights, layers=layers)


def _attention(layer: LayerWeights, device: torch.device) -> dict[str, Any]:
    """Return the projections before and after attention.

    If queries have a latent vector, its projection replaces theirs.
    """
    query = layer.query if layer.query_down is None else layer.query_down
    value = None if layer.value is layer.key else layer.value
    of_blocks = () if layer.index_query_norm is None else (layer.index_query, layer.index_key)
    parts = [each for each in (query, layer.key, value, layer.head_gate, *of_blocks) if each is not None]
    return {
        "query_key_value": _stacked(parts, device) if parts else None,
        "output": None if layer.output is None else _stacked([layer.output], device),
    }


def stacked_layer(layer: LayerWeights, device: torch.device, joins_heads: bool = False) -> StackedLayer:
    """Return one layer, stacked and on the device.

    Raises ValueError if only some parts of a stacked projection have a bias.
    """
    of_vectors = None if layer.query_down is None or layer.query is None else _stacked([layer.query], device)
    latent = stacked_latent(layer, of_vectors, device)
    qk_norms = () if latent is not None else (layer.query_norm, layer.key_norm)
    norms = [_moved(norm, device) for norm in qk_norms if norm is not None]
    whole = ("input_norm", "output_norm", "mlp_norm", "down_norm", "shared_norm", "curve", "sinks")
    moved: dict[str, Any] = {name: _moved_if_any(getattr(layer, name), device) for name in whole}
    moved |= _attention(layer, device)
    gate_up = [each for each in (layer.gate, layer.up) if each is not None]
    return StackedLayer(
        gate_up=_stacked(gate_up, device) if gate_up else None,
        down=None if layer.down is None else _stacked([layer.down], device),
        **moved,
        qk_norms=(norms[0], norms[-1]) if norms and not joins_heads else None,
        joint_norms=torch.cat(norms) if joins_heads else None,
        index_norms=_index_norms(layer, device),
        is_nope=layer.is_nope,
        rotary=layer.rotary,
        window=layer.window,
        experts=None if layer.experts is None else stacked_experts(layer.experts, device),
        mixer=None if layer.mixer is None else stacked_recurrent_layer(layer.mixer, device),
        latent=latent,
        heads=layer.heads,
        num_stored=len({id(each) for each in (layer.key, layer.value) if each is not None}),
        shared_keys=layer.shared_keys,
        layer_scale=None if layer.layer_scale is None else float(layer.layer_scale),
        ple=_layer_ple(layer, device),
    )


def _index_norms(layer: LayerWeights, device: torch.device) -> tuple[Tensor, Tensor] | None:
    if layer.index_query_norm is None or layer.index_norm is None:
        return None
    return _moved(layer.index_query_norm, device), _moved(layer.index_norm, device)


def _layer_ple(layer: LayerWeights, device: torch.device) -> LayerPLE | None:
    if layer.ple_gate is None or layer.ple_output is None or layer.ple_norm is None or layer.ple_output_norm is None:
        return None
    gate, output = (_stacked([each], device) for each in (layer.ple_gate, layer.ple_output))
    return LayerPLE(gate, output, _moved(layer.ple_norm, device), _moved(layer.ple_output_norm, device))


def _stacked(linears: Sequence[AnyLinear], device: torch.device) -> AnyLinear:
    """Stack linear layers with the same input. Raises ValueError if only some of them have a bias."""
    biases = [_moved(part.bias, device) for part in linears if part.bias is not None]
    if biases and len(biases) < len(linears):
        raise ValueError(f"found {len(biases)} biases, expected {len(linears)} or none")
    weight = _below_each_other([part.weight for part in linears], device)
    return linear_from(weight, torch.cat(biases) if len(biases) > 1 else next(iter(biases), None))


def _below_each_other(weights: Sequence[Weight], device: torch.device) -> Weight:
    packed = [weight.to(device) for weight in weights if isinstance(weight, PackedMatrix)]
    if len(packed) == len(weights) and len({each.form for each in packed}) == 1:
        whole = stacked(packed)
        if is_multiplied_packed(whole):
            return repacked(whole)
    parts = [_moved(plain(weight), device) for weight in weights]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device, detached because products into given buffers refuse gradients."""
    return tensor.detach().to(device)


def _moved_if_any(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else _moved(tensor, device)
