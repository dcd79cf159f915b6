"""Weights of a decoder by role, including experts, taken from a loaded `transformers` model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from swiftbatch.worker.kernels.kernel_sizes import COUNTS, LANES, IndexerSizes, LayerHeads, MLASizes, sizes_fault
from swiftbatch.worker.kernels.layer_specs import (
    Activation,
    NormForm,
    RecurrentWeights,
    Routing,
    recurrent_weight_shapes,
)
from swiftbatch.worker.kernels.quantized_weights import AnyLinear, Linear, PackedMatrix, Weight
from swiftbatch.worker.kernels.rope_scaling import Rotary, rotary_of


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
    choose the same experts. `gate_limit` clamps gates and ups (which then get 1 added), `gate_slope` multiplies the
    gate's sigmoid argument. `latent` are the linear layers before and after all experts. With `front_norm` experts read
    the layer's state, normed by themselves, and `behind_norm` norms their sum. `router_scale [hidden]` multiplies what
    the router reads: the state, normed without weights, by the root of its width. `choice_scales [num_experts]`
    multiply the experts' weights. Both are float32.
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


# Decoder's weights by role, and their extraction from a loaded `transformers` model.


DENSE_CLASSES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
TYPED_CLASSES = {"Qwen2ForCausalLM", "Qwen3ForCausalLM"}  # their configs give the type of each layer
STEADY_ROTARY = {"default", "linear", "llama3", "yarn"}  # their angles depend on the position alone


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
    of `num_kv_heads` and `head_dim`.
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

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"found a decoder of {self.dtype}, expected bfloat16 or float32")
        if fault := sizes_fault(**{name: getattr(self, name) for name in COUNTS}, latent=self.latent):
            raise ValueError(fault)

    @property
    def indexer(self) -> IndexerSizes | None:
        return None if self.latent is None else self.latent.indexer

    @property
    def found_width(self) -> int:
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
    key_up: AnyLinear | None = None
    value_up: AnyLinear | None = None
    index_query: AnyLinear | None = None  # of the queries' latent vector
    index_key: AnyLinear | None = None
    index_weight: AnyLinear | None = None  # of the index heads
    index_norm: Tensor | None = None  # of index keys: weights, then biases
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

    @property
    def attends(self) -> bool:
        return self.query is not None

    @property
    def intermediate(self) -> int:
        """Return the width of the layer's own MLP, or of its shared expert; 0 without either."""
        return 0 if self.up is None else self.up.weight.shape[0]


@dataclass(frozen=True)
class DecoderWeights:
    """Dense decoder: `embedding [vocab, hidden]`, layers, norm, head."""

    sizes: DecoderSizes
    embedding: Weight
    layers: list[LayerWeights]
    final_norm: Tensor
    head: AnyLinear
    rotary: Rotary

    @property
    def has_integers(self) -> bool:
        """Return whether a layer has weights that products with rows of 8 bits take."""
        weights = (weight for layer in self.layers for _, weight, _ in shapes(self.sizes, layer))
        return any(isinstance(weight, PackedMatrix) and weight.is_of_integers for weight in weights)


def other_rotary(layers: Iterable[Any]) -> Rotary | None:
    """Return the rotation of layers whose rotation is not the model's.

    Raises ValueError if these layers have several.
    """
    found = {id(layer.rotary): layer.rotary for layer in layers if layer.rotary is not None}
    if len(found) > 1:
        raise ValueError(f"found layers with {len(found)} rotations of their own, expected one at most")
    return next(iter(found.values()), None)


def stripes_of(sizes: DecoderSizes, layers: Iterable[LayerWeights]) -> tuple[int, ...]:
    """Return the heads of a cache that each attending layer takes, or () if all take the decoder's."""
    own = LayerHeads(sizes.num_kv_heads, sizes.head_dim)
    found = [layer.heads for layer in layers if layer.attends]
    return tuple((heads or own).num_stripes(sizes.head_dim) for heads in found) if any(found) else ()


def decoder_weights(model: Any) -> DecoderWeights | None:
    """Return the weights of a loaded Llama, Mistral, Qwen2 or Qwen3; None for any other model."""
    if type(model).__name__ not in DENSE_CLASSES or not type(model).__module__.startswith("transformers.models."):
        return None
    config, decoder = model.config, model.model
    windows = _windows(model)
    if windows is None or config.hidden_act != "silu" or model.device.type not in ("cpu", "meta"):
        return None
    if decoder.rotary_emb.rope_type not in STEADY_ROTARY or not all(_is_plain(part) for part in model.modules()):
        return None
    if len(decoder.layers) != config.num_hidden_layers or {each.dtype for each in model.parameters()} != {model.dtype}:
        return None
    if (sizes := _sizes_of(model)) is None:
        return None
    frequencies = decoder.rotary_emb.inv_freq
    # some dimensions are not rotated, or are rotated by non-finite angles
    if len(frequencies) * 2 != sizes.head_dim or not frequencies.isfinite().all():
        return None
    return DecoderWeights(
        sizes,
        decoder.embed_tokens.weight,
        [replace(layer_weights(layer), window=window) for layer, window in zip(decoder.layers, windows, strict=True)],
        decoder.norm.weight,
        linear_of(model.lm_head),
        _rotary(config, decoder.rotary_emb, sizes.head_dim),
    )


def _sizes_of(model: Any) -> DecoderSizes | None:
    config, attention = model.config, model.model.layers[0].self_attn
    try:
        return DecoderSizes(
            num_layers=len(model.model.layers),
            hidden=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            intermediate=config.intermediate_size,
            vocab=model.lm_head.weight.shape[0],
            epsilon=config.rms_norm_eps,
            scale=attention.scaling,
            dtype=model.dtype,
        )
    except ValueError:
        return None


def _windows(model: Any) -> list[int | None] | None:
    """Return each layer's window, or None if the model's class ignores a part of the config."""
    config, name = model.config, type(model).__name__
    size: int | None = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or []
    if name in TYPED_CLASSES and not set(types) - {"full_attention", "sliding_attention"}:
        return [size if each == "sliding_attention" else None for each in types]
    if set(types) - {"full_attention"} or (size is not None and (types or name != "MistralForCausalLM")):
        return None
    return [size] * config.num_hidden_layers


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is unmodified, without adapters or quantized weights."""
    if isinstance(module, nn.Linear | nn.Embedding):
        return type(module) in (nn.Linear, nn.Embedding)
    return type(module).__module__.startswith(("transformers.", "torch.nn."))


def _rotary(config: Any, module: Any, head_dim: int) -> Rotary:
    """Return the rotary angles, recomputed where possible because results of `pow` differ between processors."""
    try:
        return rotary_of(config.rope_parameters, head_dim)
    except (KeyError, TypeError, ValueError):  # a rotary type or parameters that only `transformers` supports
        return Rotary(module.inv_freq.float().numpy(), module.attention_scaling)


def layer_weights(layer: Any) -> LayerWeights:
    """Return the weights of a decoder layer of these classes."""
    attention, mlp = layer.self_attn, layer.mlp
    norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    query_norm, key_norm = (None if norm is None else norm.weight for norm in norms)
    return LayerWeights(
        query=linear_of(attention.q_proj),
        key=linear_of(attention.k_proj),
        value=linear_of(attention.v_proj),
        output=linear_of(attention.o_proj),
        up=linear_of(mlp.up_proj),
        down=linear_of(mlp.down_proj),
        gate=linear_of(mlp.gate_proj),
        input_norm=getattr(layer.input_layernorm, "weight", None),
        mlp_norm=layer.post_attention_layernorm.weight,
        query_norm=query_norm,
        key_norm=key_norm,
    )


def linear_of(module: Any) -> Linear:
    return Linear(module.weight, module.bias)


def shapes(sizes: DecoderSizes, layer: LayerWeights) -> Iterator[tuple[str, Weight | None, tuple[int, ...]]]:
    """Yield every tensor in the model's dtype, with its name and expected shape. Raises ValueError."""
    _check_form(sizes, layer)
    heads = layer.heads or LayerHeads(sizes.num_kv_heads, sizes.head_dim)
    width = layer.intermediate
    widths = {
        **_attention_widths(sizes, heads),
        "output": (sizes.hidden, sizes.num_heads * heads.head_dim if sizes.latent is None else sizes.found_width),
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
    for name, width in _qk_norm_widths(sizes, heads).items():
        yield name, getattr(layer, name), (width,)
    if layer.experts is not None:
        yield from expert_shapes(layer.experts, sizes.hidden, sizes.has_gates)
    if layer.mixer is not None:
        yield from recurrent_weight_shapes(layer.mixer, sizes.hidden)


def _attention_widths(sizes: DecoderSizes, heads: LayerHeads) -> dict[str, tuple[int, int]]:
    query, key, hidden = sizes.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim, sizes.hidden
    if (latent := sizes.latent) is None:
        return dict.fromkeys(("query", "head_gate"), (query, hidden)) | dict.fromkeys(("key", "value"), (key, hidden))
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
    return dict.fromkeys(("query_norm", "key_norm"), heads.head_dim)


def _check_form(sizes: DecoderSizes, layer: LayerWeights) -> None:
    """Raise ValueError for missing or unexpected parts of a layer."""
    if layer.window is not None and layer.window < 1:
        raise ValueError(f"found a window of {layer.window} positions, expected 1 or more")
    if layer.heads is not None and (fault := layer.heads.fault(sizes.num_heads, sizes.head_dim)):
        raise ValueError(fault)
    values = layer.value if sizes.latent is None else layer.value_up
    attending = {each is not None for each in (layer.query, layer.key, values, layer.output)}
    if len(attending) > 1:
        raise ValueError("found a layer with a part of attention")
    _check_latent(sizes, layer)
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


def _check_latent(sizes: DecoderSizes, layer: LayerWeights) -> None:
    """Raise ValueError for missing or unexpected parts of latent attention."""
    has_vectors, of_queries = sizes.latent is not None, sizes.latent is not None and sizes.latent.query_rank > 0
    has_parts = {each is not None for each in (layer.key_up, layer.value_up)}
    has_down = {layer.query_down is not None}
    if has_vectors:
        has_parts |= {layer.key_norm is not None, layer.value is None, layer.attends, not layer.is_nope}
        has_parts |= {layer.sinks is None, layer.window is None, layer.rotary is None, layer.heads is None}
        has_down |= {layer.query_norm is not None}
    if has_parts != {has_vectors} or has_down != {of_queries}:
        raise ValueError("found a layer with another form of latent attention than its decoder's")
    of_indexer = {
        each is not None for each in (layer.index_query, layer.index_key, layer.index_weight, layer.index_norm)
    }
    if len(of_indexer) > 1 or (True in of_indexer and sizes.indexer is None):
        raise ValueError("found a layer with a part of an indexer, or in a decoder without indexers")
