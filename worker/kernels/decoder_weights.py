"""Weights of a decoder by role, including experts, and their shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftbatch.worker.kernels.compressed_weights import PoolWeights, StreamWeights, check_pools, pool_shapes
from swiftbatch.worker.kernels.kernel_sizes import (
    COUNTS,
    LANES,
    MOST_STREAMS,
    CacheLayer,
    CompressedSizes,
    IndexerSizes,
    LayerHeads,
    MLASizes,
    Pools,
    StreamSizes,
    sizes_fault,
)
from swiftbatch.worker.kernels.layer_specs import (
    Activation,
    NormForm,
    RecurrentWeights,
    Routing,
    recurrent_weight_shapes,
)
from swiftbatch.worker.kernels.quantized_weights import AnyLinear, Linear, PackedMatrix, Weight
from swiftbatch.worker.kernels.rope_scaling import Rotary


class MayBeLatent:
    """Experts that may read a narrower projection of a row."""

    latent: tuple[AnyLinear, AnyLinear] | None

    @property
    def latent_width(self) -> int:
        return 0 if self.latent is None else self.latent[0].weight.shape[0]


@dataclass(frozen=True)
class ExpertWeights(MayBeLatent):
    """Experts of a layer; each row uses only a few of them.

    `router`, `choice_bias [num_experts]` and `shared_gate [1, hidden]` are float32 in every dtype, so that all builds
    choose the same experts. `gate_limit` clamps gates and ups. `gate_slope` multiplies the gate's sigmoid argument, and
    ups get 1 added. `choices [vocab, num_chosen] int32` are each token's experts, whatever their scores. `latent` are
    the linear layers before and after all experts. With `front_norm` experts read the layer's state, normed by
    themselves, and `behind_norm` norms their sum. `router_scale [hidden]` multiplies what the router reads: the state,
    normed without weights, by the root of its width. `choice_scales [num_experts]` multiply the experts' weights. Both
    are float32.
    """

    routing: Routing
    router: Linear
    gates: Sequence[AnyLinear]  # by expert; empty without gates
    ups: Sequence[AnyLinear]
    downs: Sequence[AnyLinear]
    choice_bias: Tensor | None = None
    shared_gate: Tensor | None = None
    gate_limit: float = 0.0
    gate_slope: float = 0.0
    latent: tuple[AnyLinear, AnyLinear] | None = None
    router_scale: Tensor | None = None
    choice_scales: Tensor | None = None
    front_norm: Tensor | None = None
    behind_norm: Tensor | None = None
    choices: Tensor | None = None

    @property
    def intermediate(self) -> int:
        return self.ups[0].weight.shape[0]

    def linears(self) -> dict[str, Sequence[AnyLinear]]:
        return {"gate": self.gates, "up": self.ups, "down": self.downs}


def expert_shapes(
    experts: ExpertWeights, hidden: int, has_gates: bool
) -> Iterator[tuple[str, Weight | None, tuple[int, ...]]]:
    """Yield every tensor in the model's dtype with its name and expected shape. Raises ValueError."""
    count, width = experts.routing.num_experts, experts.intermediate
    if width % LANES:
        raise ValueError(f"found experts of {width} columns, expected a multiple of {LANES}")
    if experts.latent is not None:
        yield from _latent_shapes(experts.latent, experts.latent_width, hidden)
    for name in ("front_norm", "behind_norm"):
        yield f"{name} of experts", getattr(experts, name), (hidden,)
    hidden = experts.latent_width or hidden
    for role, linears in experts.linears().items():
        if len(linears) != (expected := count if has_gates or role != "gate" else 0):
            raise ValueError(f"found {len(linears)} matrices {role} of experts, expected {expected}")
        shape = (hidden, width) if role == "down" else (width, hidden)
        for number, linear in enumerate(linears):
            yield f"{role} of expert {number}", linear.weight, shape
            yield f"bias of {role} of expert {number}", linear.bias, shape[:1]


def _latent_shapes(
    latent: tuple[AnyLinear, AnyLinear], width: int, hidden: int
) -> Iterator[tuple[str, Weight | None, tuple[int, ...]]]:
    if width % LANES:
        raise ValueError(f"found experts that read {width} numbers, expected a multiple of {LANES}")
    for name, linear, shape in zip(("in", "out"), latent, ((width, hidden), (hidden, width)), strict=True):
        yield f"latent {name} of experts", linear.weight, shape
        yield f"bias of latent {name} of experts", linear.bias, shape[:1]


def float_shapes(experts: ExpertWeights, hidden: int) -> Iterator[tuple[str, Tensor | None, tuple[int, ...]]]:
    """Yield every float32 tensor with its name and expected shape."""
    count = experts.routing.num_experts
    yield "router", experts.router.weight, (count, hidden)
    yield "bias of router", experts.router.bias, (count,)
    yield "bias of choices", experts.choice_bias, (count,)
    yield "scales of choices", experts.choice_scales, (count,)
    yield "scale of router", experts.router_scale, (hidden,)
    yield "gate of what all rows meet", experts.shared_gate, (1, hidden)


# Decoder's weights by role.


@dataclass(frozen=True)
class AdapterWeights:
    """A LoRA adapter's `down [rank, depth]` and `up [columns, rank]` by layer and role, float32.

    `up` includes the adapter's scale. Ranks are multiples of 16, with zeros behind the adapter's own.
    """

    layers: Sequence[Mapping[str, tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a dense decoder; `scale` multiplies attention scores.

    Norms of queries and keys span all heads (`joins_heads`), follow the rotation (`norms_after_rope`), or have weights
    per head (`qk_norms_differ`); values' norm has no weights (`norms_values`). If `is_parallel`, the MLP reads
    attention's input. Soft caps limit scores and logits; 0 means none. With `latent`, all heads share one cache entry
    of `num_kv_heads` and `head_dim`. Values may be narrower than keys: `value_dim`, or 0. Per-layer embeddings have
    `ple_dim` columns, or 0, and a table in `ple_dtype`. Gates outside experts have the limit and the slope of
    `ExpertWeights`.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    epsilon: float
    scale: float
    dtype: torch.dtype
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    norm_form: NormForm = NormForm.TWICE
    activation: Activation = Activation.SILU
    has_gates: bool = True
    joins_heads: bool = False
    norms_after_rope: bool = False
    is_parallel: bool = False
    qk_norms_differ: bool = False
    score_softcap: float = 0.0
    logit_softcap: float = 0.0
    gates_heads: bool = False
    norms_values: bool = False
    latent: MLASizes | None = None
    attention_in_scale: float = 1.0
    key_scale: float = 1.0
    attention_out_scale: float = 1.0
    gate_scale: float = 1.0
    down_scale: float = 1.0
    gate_limit: float = 0.0
    gate_slope: float = 0.0
    value_dim: int = 0
    value_scale: float = 1.0
    ple_dim: int = 0
    ple_scale: float = 1.0
    ple_dtype: torch.dtype = torch.bfloat16
    streams: StreamSizes | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"found a decoder of {self.dtype}, expected bfloat16 or float32")
        if fault := sizes_fault(**{name: getattr(self, name) for name in COUNTS}, latent=self.latent):
            raise ValueError(fault)
        reads_values = self.gates_heads or self.norms_values or self.latent is not None
        if self.value_dim % LANES or not 0 <= self.value_dim < self.head_dim or (self.value_dim and reads_values):
            raise ValueError(f"found values of {self.value_dim} in heads of {self.head_dim}")
        if self.ple_dim % LANES:
            raise ValueError(f"found per-layer embeddings of {self.ple_dim}, expected a multiple of {LANES}")
        if self.streams is not None and not 0 < self.streams.count <= MOST_STREAMS:
            raise ValueError(f"found {self.streams.count} streams, expected 1 to {MOST_STREAMS}")

    @property
    def indexer(self) -> IndexerSizes | None:
        return None if self.latent is None else self.latent.indexer

    @property
    def compressed(self) -> CompressedSizes | None:
        return self.latent if isinstance(self.latent, CompressedSizes) else None

    @property
    def state_width(self) -> int:
        return self.hidden * (1 if self.streams is None else self.streams.count)

    @property
    def found_width(self) -> int:
        if self.compressed is not None:
            return self.compressed.output_groups * self.compressed.output_rank
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def norm_width(self) -> int:
        return self.hidden * (2 if self.norm_form == NormForm.SHIFTED else 1)


@dataclass(frozen=True)
class LayerWeights:
    """One layer.

    Norms are `[hidden]`, or twice as wide if they have biases, and precede or follow attention and the MLP. Norms of
    queries and keys are `[head_dim]` or as wide as all heads. `heads` are the layer's own, if they are not the
    decoder's. `shared_norm` norms the shared expert's output. `layer_scale [1] float32` multiplies the layer's output.
    `curve [4] float32` is XIELU's: the factors of the
    quadratic, the exponential and the linear term, and the upper bound, below 0, of the exponential's argument. With
    `experts`, the layer's own MLP is the shared expert. `sinks [num_heads] float32` are attention scores without
    values. A `mixer` replaces attention or runs beside it. A layer may lack any part, or all.

    In latent attention, `key` computes the latent vector and the rotary part of keys, and `query` follows `query_down`
    if the model has it. `key_up [num_heads * rank, nope_dim]` maps a head's query to the latent vector, `value_up
    [num_heads * value_dim, rank]` maps the latent vector to a head's values. A layer without an indexer attends to the
    keys that the last indexer before it chose.
    """

    query: AnyLinear | None
    key: AnyLinear | None
    value: AnyLinear | None
    output: AnyLinear | None
    up: AnyLinear | None
    down: AnyLinear | None
    gate: AnyLinear | None = None
    head_gate: AnyLinear | None = None  # as wide as the queries
    query_down: AnyLinear | None = None
    output_down: AnyLinear | None = None  # of groups of heads, in compressed attention
    pools: Pools | None = None
    pool: PoolWeights | None = None
    index_pool: PoolWeights | None = None
    attention_streams: StreamWeights | None = None
    mlp_streams: StreamWeights | None = None
    key_up: AnyLinear | None = None
    value_up: AnyLinear | None = None
    index_query: AnyLinear | None = None  # of the queries' latent vector, or of rows
    index_key: AnyLinear | None = None
    index_weight: AnyLinear | None = None  # of the index heads
    index_norm: Tensor | None = None  # of index keys: weights, then biases; of blocks weights alone
    index_query_norm: Tensor | None = None  # of indexers of blocks
    mixer: RecurrentWeights | None = None
    experts: ExpertWeights | None = None
    sinks: Tensor | None = None
    input_norm: Tensor | None = None
    output_norm: Tensor | None = None  # norms attention's output, before the residual addition
    mlp_norm: Tensor | None = None
    down_norm: Tensor | None = None  # norms the products' output
    shared_norm: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    is_nope: bool = False
    rotary: Rotary | None = None  # None: the model's
    window: int | None = None
    curve: Tensor | None = None
    heads: LayerHeads | None = None
    layer_scale: Tensor | None = None
    shared_keys: int | None = None  # an earlier layer whose keys and values this one reads; it has none of its own
    ple_projection: AnyLinear | None = None
    ple_gate: AnyLinear | None = None
    ple_output: AnyLinear | None = None
    ple_norm: Tensor | None = None
    ple_output_norm: Tensor | None = None

    @property
    def attends(self) -> bool:
        return self.query is not None

    @property
    def keeps_keys(self) -> bool:
        return self.attends and self.shared_keys is None

    @property
    def intermediate(self) -> int:
        """Return the width of the layer's own MLP, or of its shared expert; 0 without either."""
        return 0 if self.up is None else self.up.weight.shape[0]


@dataclass(frozen=True)
class DecoderWeights:
    """Dense decoder: `embedding [vocab, hidden]`, layers, norm, head.

    `ple_table [vocab, num_layers * ple_dim]` has the per-layer embeddings. `head_streams` make one row of all streams.
    """

    sizes: DecoderSizes
    embedding: Weight
    layers: list[LayerWeights]
    final_norm: Tensor
    head: AnyLinear
    rotary: Rotary
    ple_table: Weight | None = None
    head_streams: StreamWeights | None = None

    @property
    def has_integers(self) -> bool:
        """Return whether a layer has weights that products with rows of 8 bits take."""
        weights = (weight for layer in self.layers for _, weight, _ in shapes(self.sizes, layer))
        return any(isinstance(weight, PackedMatrix) and weight.is_of_integers for weight in weights)


def stripes_of(sizes: DecoderSizes, heads: Sequence[LayerHeads | None]) -> tuple[int, ...]:
    """Return the heads of a cache that each attending layer takes, or () if all take the decoder's."""
    usual = LayerHeads(sizes.num_kv_heads, sizes.head_dim)
    return tuple((own or usual).num_stripes(sizes.head_dim) for own in heads) if any(heads) else ()


def kept_by(sizes: DecoderSizes, layers: Iterable[LayerWeights]) -> list[CacheLayer]:
    """Return the rows that caches hold of these layers."""
    usual, keeping = LayerHeads(sizes.num_kv_heads, sizes.head_dim), [layer for layer in layers if layer.keeps_keys]
    if (compressed := sizes.compressed) is not None:
        return [kept for layer in keeping for kept in compressed.kept(layer.window or 1, layer.pools)]
    return [CacheLayer(layer.window, (layer.heads or usual).num_stripes(sizes.head_dim)) for layer in keeping]


def cache_stripes(sizes: DecoderSizes, layers: Sequence[LayerWeights]) -> tuple[int, ...]:
    """Return the heads of a cache that each of its layers takes, or () if all take the decoder's."""
    if sizes.compressed is None:
        return stripes_of(sizes, [layer.heads for layer in layers if layer.keeps_keys])
    return tuple(kept.stripes for kept in kept_by(sizes, layers))


def shapes(sizes: DecoderSizes, layer: LayerWeights) -> Iterator[tuple[str, Weight | None, tuple[int, ...]]]:
    """Yield every tensor in the model's dtype, with its name and expected shape. Raises ValueError."""
    _check_form(sizes, layer)
    heads = layer.heads or LayerHeads(sizes.num_kv_heads, sizes.head_dim)
    width, values = layer.intermediate, sizes.value_dim or heads.head_dim
    found = sizes.found_width if sizes.latent is not None else sizes.num_heads * values
    widths = {
        **_attention_widths(sizes, heads),
        "output": (sizes.hidden, found),
        "ple_projection": (sizes.ple_dim, sizes.hidden),
        "ple_gate": (sizes.ple_dim, sizes.hidden),
        "ple_output": (sizes.hidden, sizes.ple_dim),
        "gate": (width, sizes.hidden),
        "up": (width, sizes.hidden),
        "down": (sizes.hidden, width),
    }
    for name, shape in widths.items():
        if (linear := getattr(layer, name)) is not None:
            yield name, linear.weight, shape
            yield f"bias of {name}", linear.bias, shape[:1]
    for name in ("input_norm", "output_norm", "mlp_norm", "down_norm", "shared_norm"):
        yield name, getattr(layer, name), (sizes.norm_width,)
    of_heads = {"ple_norm": sizes.ple_dim, "ple_output_norm": sizes.norm_width, **_qk_norm_widths(sizes, heads)}
    for name, width in of_heads.items():
        yield name, getattr(layer, name), (width,)
    if layer.experts is not None:
        yield from expert_shapes(layer.experts, sizes.hidden, sizes.has_gates)
    if layer.mixer is not None:
        yield from recurrent_weight_shapes(layer.mixer, sizes.hidden)
    for name, dim in pool_dims(sizes).items():
        yield from pool_shapes(layer.pools, getattr(layer, name), name, dim, sizes.hidden)


def pool_dims(sizes: DecoderSizes) -> dict[str, int]:
    """Return the widths of keys of a layer's pools."""
    if sizes.compressed is None or sizes.indexer is None:
        return {}
    return {"pool": sizes.head_dim, "index_pool": sizes.indexer.dim}


def _attention_widths(sizes: DecoderSizes, heads: LayerHeads) -> dict[str, tuple[int, int]]:
    query, key, hidden = sizes.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim, sizes.hidden
    values = heads.num_kv_heads * (sizes.value_dim or heads.head_dim)
    if (latent := sizes.latent) is None:
        return dict.fromkeys(("query", "head_gate"), (query, hidden)) | {
            "key": (key, hidden),
            "value": (values, hidden),
            **({} if heads.blocks is None else {"index_query": (key, hidden), "index_key": (heads.head_dim, hidden)}),
        }
    if (compressed := sizes.compressed) is not None:
        group = sizes.num_heads * sizes.head_dim // compressed.output_groups
        return {
            "query_down": (compressed.query_rank, hidden),
            "query": (sizes.num_heads * sizes.head_dim, compressed.query_rank),
            "key": (sizes.head_dim, hidden),
            "output_down": (sizes.found_width, group),
            **{name: shape for name, shape in _index_widths(hidden, compressed).items() if name != "index_key"},
        }
    return {
        "query_down": (latent.query_rank, hidden),
        "query": (sizes.num_heads * latent.query_dim, latent.query_rank or hidden),
        "key": (latent.key_dim, hidden),
        "key_up": (sizes.num_heads * latent.rank, latent.nope_dim),
        "value_up": (sizes.num_heads * latent.value_dim, latent.rank),
        **_index_widths(sizes.hidden, latent),
    }


def _index_widths(hidden: int, latent: MLASizes) -> dict[str, tuple[int, int]]:
    if (indexer := latent.indexer) is None:
        return {}
    return {
        "index_query": (indexer.num_heads * indexer.dim, latent.query_rank),
        "index_key": (indexer.dim, hidden),
        "index_weight": (indexer.num_heads, hidden),
    }


def _qk_norm_widths(sizes: DecoderSizes, heads: LayerHeads) -> dict[str, int]:
    if sizes.latent is not None:
        of_indexer = {} if (indexer := sizes.latent.indexer) is None else {"index_norm": 2 * indexer.dim}
        return of_indexer | {"query_norm": sizes.latent.query_rank, "key_norm": sizes.latent.rank}
    if sizes.joins_heads or sizes.qk_norms_differ:
        return {"query_norm": sizes.num_heads * heads.head_dim, "key_norm": heads.num_kv_heads * heads.head_dim}
    of_blocks = () if heads.blocks is None else ("index_query_norm", "index_norm")
    return dict.fromkeys(("query_norm", "key_norm", *of_blocks), heads.head_dim)


def _check_form(sizes: DecoderSizes, layer: LayerWeights) -> None:
    """Raise ValueError for missing or unexpected parts of a layer."""
    if layer.window is not None and layer.window < 1:
        raise ValueError(f"found a window of {layer.window} positions, expected 1 or more")
    if layer.heads is not None and (fault := layer.heads.fault(sizes.num_heads, sizes.head_dim)):
        raise ValueError(fault)
    values = layer.value if sizes.latent is None else layer.key if sizes.compressed is not None else layer.value_up
    attending = {each is not None for each in (layer.query, layer.output)}
    attending |= {(each is None) == (layer.shared_keys is not None) for each in (layer.key, values)}
    if len(attending) > 1:
        raise ValueError("found a layer with a part of attention")
    _check_latent(sizes, layer)
    _check_own_parts(sizes, layer)
    if (layer.head_gate is not None) != (sizes.gates_heads and layer.attends):
        raise ValueError(f"found attention {'without' if sizes.gates_heads else 'with'} gates, expected the other form")
    if (layer.up is None) != (layer.down is None):
        raise ValueError("found a layer with a part of its products")
    if layer.intermediate % LANES:
        raise ValueError(f"found products of {layer.intermediate} columns, expected a multiple of {LANES}")
    if (layer.gate is not None) != (sizes.has_gates and layer.up is not None):
        raise ValueError(f"found a layer {'without' if sizes.has_gates else 'with'} gates, expected the other form")
    if layer.query_norm is not None and sizes.norm_form == NormForm.SHIFTED:
        raise ValueError("found norms of heads, expected none beside norms with biases")
    curve, has_curve = layer.curve, sizes.activation == Activation.XIELU
    if (curve is not None) != has_curve or (curve is not None and (curve.shape, curve.dtype) != ((4,), torch.float32)):
        raise ValueError(
            f"found {'no' if curve is None else 'another'} curve, expected {'one' if has_curve else 'none'}"
        )


def _check_own_parts(sizes: DecoderSizes, layer: LayerWeights) -> None:
    """Raise ValueError for missing or unexpected parts of per-layer embeddings or shared keys."""
    names = ("ple_projection", "ple_gate", "ple_output", "ple_norm", "ple_output_norm")
    if {getattr(layer, name) is not None for name in names} != {sizes.ple_dim > 0}:
        raise ValueError("found a layer with a part of per-layer embeddings, or in a decoder without them")
    changes_keys = sizes.joins_heads or sizes.latent is not None or (sizes.key_scale, sizes.value_scale) != (1.0, 1.0)
    if layer.shared_keys is not None and (changes_keys or layer.key_norm is not None or layer.mixer is not None):
        raise ValueError("found a layer that shares keys and changes them")


def _check_latent(sizes: DecoderSizes, layer: LayerWeights) -> None:
    """Raise ValueError for missing or unexpected parts of latent or compressed attention."""
    if sizes.compressed is not None:
        has_plain = layer.window is not None and not layer.is_nope and layer.heads is None and layer.value is None
        of_attention = (layer.query_down, layer.query, layer.key, layer.output_down, layer.query_norm, layer.key_norm)
        if not has_plain or any(each is None for each in (*of_attention, layer.sinks)):
            raise ValueError("found a layer with a part of compressed attention")
        check_pools(layer.pools, layer.pool, (layer.index_pool, layer.index_query, layer.index_weight))
        return
    if any(each is not None for each in (layer.pools, layer.pool, layer.index_pool, layer.output_down)):
        raise ValueError("found a layer with pooled keys in a decoder without them")
    has_vectors, of_queries = sizes.latent is not None, sizes.latent is not None and sizes.latent.query_rank > 0
    has_parts = {each is not None for each in (layer.key_up, layer.value_up)}
    has_down = {layer.query_down is not None}
    if has_vectors:
        has_parts |= {layer.key_norm is not None, layer.value is None, layer.attends, not layer.is_nope}
        has_parts |= {layer.sinks is None, layer.window is None, layer.rotary is None, layer.heads is None}
        has_down |= {layer.query_norm is not None}
    if has_parts != {has_vectors} or has_down != {of_queries}:
        raise ValueError("found a layer with another form of latent attention than its decoder's")
    own = {each is not None for each in (layer.index_weight if has_vectors else layer.index_query_norm,)}
    of_indexer = {each is not None for each in (layer.index_query, layer.index_key, layer.index_norm)} | own
    has_blocks = layer.heads is not None and layer.heads.blocks is not None
    may_have = {True, False} if sizes.indexer is not None else {has_blocks}
    if len(of_indexer) > 1 or not of_indexer <= may_have:
        raise ValueError("found a layer with a part of an indexer, or in a decoder without indexers")
