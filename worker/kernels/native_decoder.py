"""Dense decoder in the compiled C kernels, on a CPU."""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swiftbatch.worker.kernels.compressed_weights import PoolWeights, StreamWeights, stream_shapes
from swiftbatch.worker.kernels.decoder_weights import (
    AdapterWeights,
    DecoderSizes,
    DecoderWeights,
    ExpertWeights,
    LayerWeights,
    cache_stripes,
    float_shapes,
    kept_by,
    pool_dims,
    shapes,
)
from swiftbatch.worker.kernels.kernel_sizes import HEAD_DIMS
from swiftbatch.worker.kernels.layer_specs import SEES_ALL, AttentionView, recurrent_float_shapes
from swiftbatch.worker.kernels.native_library import Team, load_library, shared_team
from swiftbatch.worker.kernels.native_recurrence import SequenceTable
from swiftbatch.worker.kernels.native_weights import (
    ELEMENTS,
    QuantizedRows,
    check_weights,
    checked,
    decoder_sizes_of,
    load_experts,
    load_recurrent_layer,
    load_weight,
)
from swiftbatch.worker.kernels.quantized_weights import Linear, PackedLinear, Weight
from swiftbatch.worker.kernels.rope_cos_sin import AngleTable, QueryScaleTable
from swiftbatch.worker.kernels.rope_scaling import Rotary, other_rotary
from swiftbatch.worker.kernels.row_tables import NOWHERE, CachePlace, LayerCacheShape, Rows, RowTable

POOL_PARTS = ("key", "gate", "bias", "norm")
STREAMS, STREAM_PARTS = ("attention_streams", "mlp_streams", "head_streams"), ("mix", "bias", "scale")
ROLES = {  # in the order of `weight_role` in source/api.h; parts of a layer have the names of `LayerWeights`
    name: number
    for number, name in enumerate(
        (
            *("embedding", "final_norm", "head"),
            *("input_norm", "query", "key", "value", "query_norm", "key_norm", "output", "output_norm"),
            *("mlp_norm", "gate", "up", "down", "down_norm"),
            *("without rotation", "seen window", "other angles", "curve", "sinks", "head_gate"),
            *("without attention", "columns of products", "query_down", "key_up", "value_up"),
            *("index_query", "index_key", "index_weight", "index_norm", "index_query_norm"),
            *("own heads", "shared_norm", "layer_scale", "shared keys"),
            *("ple_table", "ple_projection", "ple_norm", "ple_gate", "ple_output", "ple_output_norm"),
            *("pools of keys", *(f"{pool}.{part}" for pool in ("pool", "index_pool") for part in POOL_PARTS)),
            *("output_down", *(f"{name}.{part}" for name in STREAMS for part in STREAM_PARTS)),
        )
    )
}


class CForwardCall(ctypes.Structure):
    """`forward_call` of source/api.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions", "angles", "other_angles", "query_scales")),
        *((name, ctypes.c_void_p) for name in ("groups", "sequences")),
        *((name, ctypes.c_int32) for name in ("num_rows", "num_groups", "num_sequences")),
        *((name, ctypes.c_int32) for name in ("first_layer", "end_layer", "embeds")),
        *((name, ctypes.c_void_p) for name in ("state", "hidden", "logits", "queries")),
    )


def check_layers(sizes: DecoderSizes, layers: list[LayerWeights]) -> None:
    if len(layers) != sizes.num_layers:
        raise ValueError(f"found {len(layers)} layers, expected {sizes.num_layers}")
    if sizes.indexer is not None and sizes.compressed is None and layers[0].index_norm is None:
        raise ValueError("found a first layer without an indexer, expected one whose choice others use")
    check_weights((each for layer in layers for each in shapes(sizes, layer)), sizes.dtype)
    check_weights((each for layer in layers for each in _floats(sizes, layer)), torch.float32)
    check_weights((_experts_of_tokens(sizes, each.experts) for each in layers if each.experts), torch.int32)
    if len(found := {layer.heads for layer in layers} - {None}) > 1:
        raise ValueError(f"found layers with {len(found)} sizes of heads of their own, expected one at most")
    for number, layer in enumerate(layers):
        if (source := layer.shared_keys) is not None:
            of_source = layers[source] if 0 <= source < number else layer
            if not of_source.keeps_keys or of_source.heads != layer.heads or not found:
                raise ValueError(f"found layer {number} with the keys of layer {source}, expected an earlier one")


class NativeLayers:
    """Layers packed for the kernels, and forwards of rows of any sequences through these layers."""

    def __init__(
        self,
        sizes: DecoderSizes,
        layers: list[LayerWeights],
        rotary: Rotary,
        team: Team,
        as_integers: bool = False,
    ) -> None:
        """Pack each layer and remove it from `layers`.

        `as_integers`: products with packed weights round their rows to 8 bits where the weights' form allows that.
        Raises ValueError, and removes no layer, if the kernels do not support the weights.
        """
        check_layers(sizes, layers)
        self.sizes = sizes
        self._as_integers = as_integers
        self._conv_width = conv_width_of(layers)
        self._keeping = [number for number, layer in enumerate(layers) for _ in kept_by(sizes, [layer])]
        self._shares_keys = any(layer.shared_keys is not None for layer in layers)
        blocks = next((layer.heads.blocks for layer in layers if layer.heads is not None), None)
        self._has_indexers = blocks is not None or sizes.indexer is not None
        self.team = team
        self._library = team.library
        self._shape = LayerCacheShape(sizes.num_kv_heads, sizes.head_dim, sizes.dtype)
        self._stripes = cache_stripes(sizes, layers)
        self._angles = AngleTable(rotary, sizes.dtype)
        other = other_rotary(layers)
        self._other_angles = None if other is None else AngleTable(other, sizes.dtype)
        self._query_scales = None if rotary.growth is None else QueryScaleTable(rotary.growth, sizes.dtype)
        self._places: weakref.WeakKeyDictionary[Any, dict[range, CachePlace]] = weakref.WeakKeyDictionary()
        c_sizes = decoder_sizes_of(sizes, blocks)
        self.handle: int = self._library.decoder_new(ctypes.byref(c_sizes))
        weakref.finalize(self, team.retire, self._library.decoder_free, self.handle)
        self._num_adapters = 0
        for number in range(sizes.num_layers):
            self._load_layer(number, layers.pop(0))

    def run(
        self,
        groups: Sequence[Rows],
        layers: range,
        state: Tensor,
        embeds: bool = False,
        hidden: Tensor | None = None,
        logits: Tensor | None = None,
        queries: Tensor | None = None,
    ) -> None:
        """Run rows through some layers, updating `state [num_rows, hidden] float32` and the caches.

        If `embeds`, the state starts as the tokens' embeddings. The last layer fills `hidden` and `logits`. Rotated
        `queries [num_layers_of_call, num_rows, num_heads, head_dim]` have the model's dtype. Raises ValueError.
        """
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= self.sizes.num_layers:
            raise ValueError(f"found layers {layers}, expected some of {self.sizes.num_layers}")
        table = self.table(groups, layers)
        shape = (table.num_rows, self.sizes.state_width)
        if state.shape != shape or state.dtype != torch.float32 or not state.is_contiguous():
            raise ValueError(f"found a state of {state.dtype} {list(state.shape)}, expected float32 {list(shape)}")
        self._check_queries(queries, len(self.keeping_among(layers)), table.num_rows)
        sequences = self._sequences(groups, layers)
        with self.team.lock:
            call = self.call(table, layers, int(table.positions.max()), state, embeds, hidden, logits, queries)
            if sequences is not None:
                call.sequences, call.num_sequences = ctypes.addressof(sequences.sequences), len(sequences.sequences)
            self._library.decoder_forward(self.handle, self.team.handle, ctypes.byref(call))
            self.team.hold([*groups, sequences])

    def add_adapter(self, adapter: AdapterWeights) -> None:
        """Load a LoRA adapter. `RowCache.adapter` counts them from 1 on."""
        self._num_adapters = int(self._library.decoder_adapter(self.handle))
        for number, layer in enumerate(adapter.layers):
            for role, weights in layer.items():
                down, up = (weight.contiguous() for weight in weights)
                place = (self.handle, self._num_adapters, number, ROLES[role], len(down))
                self._library.decoder_load_adapter(*place, down.data_ptr(), up.data_ptr())

    def keeping_among(self, layers: range) -> range:
        """Return the places of some layers' caches: their numbers among the layers that keep keys."""
        return range(*(bisect.bisect_left(self._keeping, end) for end in (layers.start, layers.stop)))

    def _sequences(self, groups: Sequence[Rows], layers: range) -> SequenceTable | None:
        """Return the rows for layers with a mixer, or None if no layer has a mixer."""
        if self._conv_width is None:
            return None
        if len(layers) != self.sizes.num_layers:
            raise ValueError(f"found layers {layers} of a decoder with mixers, expected all {self.sizes.num_layers}")
        return SequenceTable.of(groups, self._conv_width)

    @property
    def num_experts_met(self) -> int:
        """Return the number of distinct experts used per layer and call, summed over all layers and calls."""
        return int(self._library.decoder_experts_met(self.handle))

    def table(self, groups: Sequence[Rows], layers: range) -> RowTable:
        """Return the table of a call over some layers. Raises ValueError for entries beyond a cache."""
        if self.sizes.compressed is not None and any(group.is_partial for group in groups):
            raise ValueError("found a part of a cache of a decoder with pooled keys, expected all of its positions")
        if self.sizes.latent is not None and any(group.scanned is not None for group in groups):
            raise ValueError("found scanned keys of a decoder with latent vectors, expected none")
        keeping = self.keeping_among(range(self.sizes.num_layers) if self._shares_keys else layers)
        places = [self._place(group.cache, keeping) for group in groups]
        table = RowTable.of(self._library, groups, places, self.sizes.vocab)
        if self._num_adapters:
            for entry, group in zip(table.groups, groups, strict=True):
                entry.adapter = group.cache.adapter
        if self._has_indexers and any(group.kv_code for group in table.groups):
            raise ValueError("found caches of 8 bits of a decoder with indexers, expected its dtype")
        return table

    def call(
        self,
        table: RowTable,
        layers: range,
        last_position: int,
        state: Tensor,
        embeds: bool,
        hidden: Tensor | None,
        logits: Tensor | None,
        queries: Tensor | None = None,
    ) -> CForwardCall:
        """Return the struct of a C call; the caller holds the team's lock until the call is over."""
        return CForwardCall(
            token_ids=table.token_ids.ctypes.data,
            positions=table.positions.ctypes.data,
            angles=self._angles.address(last_position),
            other_angles=None if self._other_angles is None else self._other_angles.address(last_position),
            query_scales=None if self._query_scales is None else self._query_scales.address(last_position),
            sequences=None,
            groups=ctypes.addressof(table.groups),
            num_rows=table.num_rows,
            num_groups=table.num_groups,
            num_sequences=0,
            first_layer=layers.start,
            end_layer=layers.stop,
            embeds=embeds,
            state=state.data_ptr(),
            hidden=None if hidden is None else hidden.data_ptr(),
            logits=None if logits is None else logits.data_ptr(),
            queries=None if queries is None else queries.data_ptr(),
        )

    def _check_queries(self, queries: Tensor | None, num_layers: int, num_rows: int) -> None:
        shape = (num_layers, num_rows, self.sizes.num_heads, self.sizes.head_dim)
        if queries is not None and self._stripes:
            raise ValueError("found room for queries of layers with heads of several sizes, expected none")
        if queries is not None:
            checked("room for queries", queries, shape, self.sizes.dtype)
            if not queries.is_contiguous():
                raise ValueError(f"found room for queries with strides {queries.stride()}, expected it side by side")

    def _place(self, cache: Any, layers: range) -> CachePlace:
        if not layers:
            return NOWHERE
        shape = replace(self._shape, stripes=self._stripes[layers.start : layers.stop])
        if cache.comes_by_layer:
            return CachePlace.of([cache.layer(layer) for layer in layers], shape)
        known = self._places.setdefault(cache, {})
        if layers not in known:
            known[layers] = CachePlace.of([cache.layer(layer) for layer in layers], shape)
        return known[layers]

    def _load_layer(self, number: int, layer: LayerWeights) -> None:
        heads = layer.heads
        own = None if heads is None else (heads.num_kv_heads, heads.head_dim, heads.blocks is not None)
        pools = None if layer.pools is None else dataclasses.astuple(layer.pools)
        for role, numbers in (("shared keys", layer.shared_keys), ("own heads", own), ("pools of keys", pools)):
            if numbers is not None:
                self._load(number, role, torch.tensor(numbers, dtype=torch.int32))
        if layer.experts is not None:
            load_experts(self._library, self.handle, number, layer.experts, layer.intermediate, self._as_integers)
        elif layer.intermediate != self.sizes.intermediate:
            self._load(number, "columns of products", torch.tensor(layer.intermediate, dtype=torch.int32))
        if layer.mixer is not None:
            load_recurrent_layer(self._library, self.handle, number, layer.mixer, self._as_integers)
        for name in ("pool", "index_pool", *STREAMS[:2]):
            self._load_parts(number, name, getattr(layer, name))
        for role in ROLES:
            part = getattr(layer, role, None)
            if isinstance(part, Linear | PackedLinear):
                self._load(number, role, part.weight, part.bias)
            elif part is not None:
                self._load(number, role, part)
        self._mark(number, layer)

    def _load_parts(self, number: int, name: str, parts: PoolWeights | StreamWeights | None) -> None:
        for field in () if parts is None else dataclasses.fields(parts):
            part = getattr(parts, field.name)
            weight, bias = (part, None) if isinstance(part, Tensor) else (part.weight, part.bias)
            self._load(number, f"{name}.{field.name}", weight, bias)

    def _mark(self, number: int, layer: LayerWeights) -> None:
        """Tell the kernels which parts a layer lacks or computes differently."""
        marks = {"other angles": layer.rotary is not None, "without rotation": layer.is_nope}
        marks |= {"without attention": not layer.attends}
        for role in (role for role, is_so in marks.items() if is_so):
            self._library.decoder_load(self.handle, number, ROLES[role], None)
        if layer.window is not None:
            self._load(number, "seen window", torch.tensor(layer.window, dtype=torch.int32))

    def _load(
        self, layer: int, role: str, weight: Weight, bias: Tensor | None = None
    ) -> tuple[Tensor | None, QuantizedRows | None]:
        load = functools.partial(self._library.decoder_load, self.handle, layer, ROLES[role])
        return load_weight(load, weight, bias, self._as_integers)


def _floats(sizes: DecoderSizes, layer: LayerWeights) -> Iterator[tuple[str, Weight | None, tuple[int, ...]]]:
    yield "sinks", layer.sinks, (sizes.num_heads,)
    yield "layer_scale", layer.layer_scale, (1,)
    if layer.experts is not None:
        yield from float_shapes(layer.experts, sizes.hidden)
    for name, dim in pool_dims(sizes).items():
        if layer.pools is not None and (pool := getattr(layer, name)) is not None:
            yield f"bias of {name}", pool.bias, (layer.pools.ratio, layer.pools.series * dim)
    for name in STREAMS[:2]:
        yield from stream_shapes(sizes.streams, sizes.hidden, name, getattr(layer, name))
    if layer.mixer is not None:
        yield from recurrent_float_shapes(layer.mixer)


def _experts_of_tokens(sizes: DecoderSizes, experts: ExpertWeights) -> tuple[str, Tensor | None, tuple[int, ...]]:
    return "table of experts", experts.choices, (sizes.vocab, experts.routing.num_chosen)


def conv_width_of(layers: Iterable[LayerWeights]) -> int | None:
    """Return the number of convolution taps that all mixers share, or None if no layer has a mixer.

    Raises ValueError if their sizes differ.
    """
    sizes = {layer.mixer.sizes for layer in layers if layer.mixer is not None}
    if len(sizes) > 1:
        raise ValueError(f"found mixers of {len(sizes)} sizes, expected one")
    return next(iter(sizes)).conv_width if sizes else None


# Python interface of the compiled kernels, a decoder and attention; invalid arguments raise ValueError.


class CAttentionSizes(ctypes.Structure):
    """`attention_sizes` of source/api.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("element", "num_heads", "num_kv_heads", "head_dim")),
        ("scale", ctypes.c_float),
    )


class CAttentionView(ctypes.Structure):
    """`attention_view` of source/api.h."""

    _fields_ = (("window", ctypes.c_int32), ("softcap", ctypes.c_float), ("sinks", ctypes.c_void_p))


def _c_view(view: AttentionView, num_heads: int) -> tuple[CAttentionView, Tensor | None]:
    """Return a view's struct, and the sinks that it points to.

    Raises ValueError if the sinks have another shape or dtype.
    """
    sinks = view.sinks
    if sinks is not None:
        sinks = checked("sinks", sinks.float(), (num_heads,), torch.float32)
    address = None if sinks is None else sinks.data_ptr()
    return CAttentionView(view.window or 0, view.softcap or 0.0, address), sinks


class NativeDecoder(NativeLayers):
    """Whole decoder: embedding, layers, norm, head."""

    def __init__(self, weights: DecoderWeights, num_threads: int, variant: str, as_integers: bool = False) -> None:
        """Raise ValueError for weights that the kernels do not support, KernelError if the library does not load."""
        _check_ends(weights)
        team = shared_team(load_library(variant), num_threads)
        super().__init__(weights.sizes, weights.layers, weights.rotary, team, as_integers)
        numbers, self._packed = self._load(0, "embedding", weights.embedding)  # the kernels read it in place
        self.embedding = weights.embedding if numbers is None else numbers
        if weights.ple_table is not None:
            self._ple_table = self._load(0, "ple_table", weights.ple_table)  # read in place, too
        self._load_parts(0, "head_streams", weights.head_streams)
        self._load(0, "final_norm", weights.final_norm)
        self._load(0, "head", weights.head.weight, weights.head.bias)

    def forward(
        self,
        groups: Sequence[Rows],
        with_logits: bool = True,
        layers: range | None = None,
        state: Tensor | None = None,
        queries: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return final hidden states `[num_rows, hidden]` in the model's dtype and logits `[num_rows, vocab] float32`.

        A call over some `layers` updates `state [num_rows, hidden] float32`; only the last layer returns hidden states
        and logits. Rotated `queries [num_layers_of_call, num_rows, num_heads, head_dim]` have the model's dtype. Raises
        ValueError.
        """
        layers = range(self.sizes.num_layers) if layers is None else layers
        num_rows = sum(len(group) for group in groups)
        if state is None:
            if len(layers) != self.sizes.num_layers:
                raise ValueError("found no state, expected one in a call over some of the layers")
            state = torch.empty(num_rows, self.sizes.state_width)
        is_last = layers.stop == self.sizes.num_layers
        hidden = torch.empty(num_rows, self.sizes.hidden, dtype=self.sizes.dtype) if is_last else None
        logits = torch.empty(num_rows, self.sizes.vocab) if is_last and with_logits else None
        self.run(groups, layers, state, layers.start == 0, hidden, logits, queries)
        return hidden, logits

    def embed(self, token_ids: Tensor) -> Tensor:
        if isinstance(self.embedding, Tensor):
            return self.embedding[token_ids]
        return self.embedding.rows(token_ids.flatten()).dequantized().view(*token_ids.shape, self.sizes.hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the head to hidden states `[num_rows, hidden]`: `[num_rows, vocab] float32`. Raises ValueError."""
        hidden = checked("hidden states", hidden, (len(hidden), self.sizes.hidden), self.sizes.dtype)
        logits = torch.empty(len(hidden), self.sizes.vocab)
        with self.team.lock:
            self._library.decoder_head(
                self.handle,
                self.team.handle,
                len(hidden),
                hidden.data_ptr(),
                logits.data_ptr(),
            )
        return logits


def native_attention(
    team: Team,
    groups: Sequence[Rows],
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    view: AttentionView = SEES_ALL,
) -> Tensor:
    """Store keys and values `[num_rows, num_kv_heads, head_dim]` in the layer's cache, and attend.

    `query` and result are `[num_rows, num_heads, head_dim]`, all in the caches' dtype. Raises ValueError.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if query.dtype not in ELEMENTS or head_dim not in HEAD_DIMS or num_heads % num_kv_heads:
        raise ValueError(f"found queries of {query.dtype} {list(query.shape)} for {num_kv_heads} heads of keys")
    query = checked("queries", query, (num_rows, num_heads, head_dim), query.dtype)
    key = checked("keys", key, (num_rows, num_kv_heads, head_dim), query.dtype)
    value = checked("values", value, (num_rows, num_kv_heads, head_dim), query.dtype)
    shape = LayerCacheShape(num_kv_heads, head_dim, query.dtype)
    table = RowTable.of(
        team.library, groups, [CachePlace.of([group.cache.layer(layer)], shape) for group in groups], 2**31 - 1
    )
    if table.num_rows != num_rows:
        raise ValueError(f"found {num_rows} queries for {table.num_rows} rows")
    output = torch.empty_like(query)
    sizes = CAttentionSizes(
        element=ELEMENTS[query.dtype], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=scale
    )
    c_view, _sinks = _c_view(view, num_heads)
    tensors = (query, key, value, output)
    with team.lock:
        team.library.attend(
            team.handle,
            ctypes.byref(sizes),
            ctypes.byref(c_view),
            table.groups,
            table.num_groups,
            *(tensor.data_ptr() for tensor in tensors),
        )
        team.hold(list(groups))
    return output


def _check_ends(weights: DecoderWeights) -> None:
    sizes = weights.sizes
    table = (sizes.vocab, sizes.hidden)
    ends: list[tuple[str, Weight | None, tuple[int, ...]]] = [
        ("head", weights.head.weight, table),
        ("bias of head", weights.head.bias, (sizes.vocab,)),
        ("embedding", weights.embedding, table),
        ("final_norm", weights.final_norm, (sizes.norm_width,)),
    ]
    check_weights(ends, sizes.dtype)
    check_weights(
        stream_shapes(sizes.streams, sizes.hidden, "the head", weights.head_streams, is_head=True), torch.float32
    )
    if (weights.ple_table is None) != (sizes.ple_dim == 0):
        raise ValueError("found per-layer embeddings without a table, or a table without them")
    if (ple := weights.ple_table) is not None:
        shape = (sizes.vocab, sizes.num_layers * sizes.ple_dim)
        check_weights([("table of per-layer embeddings", ple, shape)], sizes.ple_dtype)
