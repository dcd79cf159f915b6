"""Layers of a dense decoder, packed for the compiled kernels. What would crash these is a ValueError."""

from __future__ import annotations

import bisect
import ctypes
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from swiftbatch.worker.kernels.compute_threads import ELEMENTS, Team
from swiftbatch.worker.kernels.decoder_weights import (
    AnyLinear,
    DecoderSizes,
    LayerWeights,
    Linear,
    PackedLinear,
    other_rotary,
    plain_linear,
    shapes,
)
from swiftbatch.worker.kernels.expert_weights import float_shapes
from swiftbatch.worker.kernels.mixer_calls import SequenceTable, load_mixer
from swiftbatch.worker.kernels.mixer_sizes import mixer_float_shapes
from swiftbatch.worker.kernels.packed_weights import Weight
from swiftbatch.worker.kernels.quantized_rows import load_experts, quantized_rows
from swiftbatch.worker.kernels.rotary_angles import AngleTable, QueryScaleTable
from swiftbatch.worker.kernels.rotary_frequencies import Rotary
from swiftbatch.worker.kernels.row_tables import CachePlace, LayerCacheShape, Rows, RowTable

LAYER_ROLES = {  # in the order of `weight_role` in source/api.h
    name: 3 + number
    for number, name in enumerate(
        (
            *("input_norm", "query", "key", "value", "query_norm", "key_norm", "output", "output_norm"),
            *("mlp_norm", "gate", "up", "down", "down_norm"),
        )
    )
}
STILL = 3 + len(LAYER_ROLES)
WINDOW = STILL + 1
OTHER_ANGLES = WINDOW + 1
CURVE = OTHER_ANGLES + 1
SINKS = CURVE + 1
HEAD_GATE, NO_ATTENTION, NO_PRODUCTS = range(SINKS + 1, SINKS + 4)
LATENT_ROLES = {"query_down": NO_PRODUCTS + 1, "key_up": NO_PRODUCTS + 2, "value_up": NO_PRODUCTS + 3}


class CDecoderSizes(ctypes.Structure):
    """`decoder_sizes` of source/api.h."""

    SCALES = ("epsilon", "scale", "embedding_scale", "residual_scale", "logit_scale", "score_cap", "logit_cap")
    MORE_SCALES = ("attention_in_scale", "key_scale", "attention_out_scale", "gate_scale", "down_scale")
    COUNTS = ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate", "vocab")
    FORMS = ("norm_form", "activation", "has_gates", "joins_heads", "norms_turned", "is_parallel")
    MORE_FORMS = ("head_norms_differ", "gates_heads")
    LATENT = ("latent_rank", "query_rank", "still_dim", "value_dim")
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("element", *COUNTS, *FORMS, *MORE_FORMS, *LATENT)),
        *((name, ctypes.c_float) for name in (*SCALES, *MORE_SCALES)),
    )


class CForwardCall(ctypes.Structure):
    """`forward_call` of source/api.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions", "angles", "other_angles", "query_scales")),
        *((name, ctypes.c_void_p) for name in ("groups", "sequences")),
        *((name, ctypes.c_int32) for name in ("num_rows", "num_groups", "num_sequences", "first_layer", "end_layer")),
        *((name, ctypes.c_void_p) for name in ("state", "hidden", "logits", "queries")),
    )


def check_layers(sizes: DecoderSizes, layers: list[LayerWeights]) -> None:
    """Raise ValueError for other layers than those of a decoder of these sizes."""
    if len(layers) != sizes.num_layers:
        raise ValueError(f"found {len(layers)} layers, expected {sizes.num_layers}")
    check_weights((each for layer in layers for each in shapes(sizes, layer)), sizes.dtype)
    check_weights((each for layer in layers for each in _floats(sizes, layer)), torch.float32)


class NativeLayers:
    """Layers packed for the kernels, and forwards through them over the rows of any number of sequences."""

    def __init__(self, sizes: DecoderSizes, layers: list[LayerWeights], rotary: Rotary, team: Team) -> None:
        """Take each layer out of `layers` as it is packed: none of them is there twice for long.

        Raises ValueError for weights that do not fit together, and takes none then.
        """
        check_layers(sizes, layers)
        self.sizes = sizes
        self._conv_width = conv_width_of(layers)
        self._attending = [number for number, layer in enumerate(layers) if layer.attends]
        self.team = team
        self._library = team.library
        self._shape = LayerCacheShape(sizes.num_kv_heads, sizes.head_dim, sizes.dtype)
        self._angles = AngleTable(rotary, sizes.dtype)
        other = other_rotary(layers)
        self._other_angles = None if other is None else AngleTable(other, sizes.dtype)
        self._query_scales = None if rotary.growth is None else QueryScaleTable(rotary.growth, sizes.dtype)
        self._places: weakref.WeakKeyDictionary[Any, dict[range, CachePlace]] = weakref.WeakKeyDictionary()
        names = (field[0] for field in CDecoderSizes._fields_[1:] if field[0] not in CDecoderSizes.LATENT)
        numbers = {name: getattr(sizes, name) for name in names}
        if (latent := sizes.latent) is not None:
            of_vectors = (latent.rank, latent.query_rank, latent.still_dim, latent.value_dim)
            numbers |= dict(zip(CDecoderSizes.LATENT, of_vectors, strict=True))
        c_sizes = CDecoderSizes(element=ELEMENTS[sizes.dtype], **numbers)
        self.handle: int = self._library.decoder_new(ctypes.byref(c_sizes))
        weakref.finalize(self, team.retire, self._library.decoder_free, self.handle)
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
        """Take rows through some of the layers: `state [num_rows, hidden] float32` goes in and comes out.

        Keys and values of the rows go to their slots. With `embeds` the state comes from the tokens. What a decoder has
        behind its layers is written to `hidden` and, with it, `logits`; `queries [num_layers_of_call, num_rows,
        num_heads, head_dim]` of the model's dtype are filled as they meet the keys. Raises ValueError.
        """
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= self.sizes.num_layers:
            raise ValueError(f"found layers {layers}, expected some of {self.sizes.num_layers}")
        table = self.table(groups, layers)
        shape = (table.num_rows, self.sizes.hidden)
        if state.shape != shape or state.dtype != torch.float32 or not state.is_contiguous():
            raise ValueError(f"found a state of {state.dtype} {list(state.shape)}, expected float32 {list(shape)}")
        self._check_queries(queries, len(self._attending_among(layers)), table.num_rows)
        sequences = self._sequences(groups, layers)
        with self.team.lock:
            call = self.call(table, layers, int(table.positions.max()), state, embeds, hidden, logits, queries)
            if sequences is not None:
                call.sequences, call.num_sequences = ctypes.addressof(sequences.sequences), len(sequences.sequences)
            self._library.decoder_forward(self.handle, self.team.handle, ctypes.byref(call))
            self.team.hold([*groups, sequences])

    def _attending_among(self, layers: range) -> range:
        """The layers among these that attend, by their numbers in a cache."""
        return range(*(bisect.bisect_left(self._attending, end) for end in (layers.start, layers.stop)))

    def _sequences(self, groups: Sequence[Rows], layers: range) -> SequenceTable | None:
        """The rows as layers with a mixer see them; None where there are none. Raises ValueError."""
        if self._conv_width is None:
            return None
        if len(layers) != self.sizes.num_layers:
            raise ValueError(f"found layers {layers} of a decoder with mixers, expected all {self.sizes.num_layers}")
        return SequenceTable.of(groups, self._conv_width)

    @property
    def num_experts_met(self) -> int:
        """The experts that rows of all calls so far met, each once in a layer of a call."""
        return int(self._library.decoder_experts_met(self.handle))

    def table(self, groups: Sequence[Rows], layers: range) -> RowTable:
        """The rows of a call over some layers of their caches. Raises ValueError for what would reach beyond one."""
        if self.sizes.latent is not None and any(group.scanned is not None for group in groups):
            raise ValueError("found scanned keys of a decoder with latent vectors, expected none")
        attending = self._attending_among(layers)
        places = [self._place(group.cache, attending) for group in groups]
        return RowTable.of(self._library, groups, places, self.sizes.vocab)

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
        """Describe the call to C, for positions up to the last one. Hold the team's lock until the call is over."""
        return CForwardCall(
            token_ids=table.token_ids.ctypes.data if embeds else None,
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
            state=state.data_ptr(),
            hidden=None if hidden is None else hidden.data_ptr(),
            logits=None if logits is None else logits.data_ptr(),
            queries=None if queries is None else queries.data_ptr(),
        )

    def _check_queries(self, queries: Tensor | None, num_layers: int, num_rows: int) -> None:
        shape = (num_layers, num_rows, self.sizes.num_heads, self.sizes.head_dim)
        if queries is not None:
            checked("room for queries", queries, shape, self.sizes.dtype)
            if not queries.is_contiguous():
                raise ValueError(f"found room for queries with strides {queries.stride()}, expected it side by side")

    def _place(self, cache: Any, layers: range) -> CachePlace:
        if cache.comes_by_layer:
            return CachePlace.of([cache.layer(layer) for layer in layers], self._shape)
        known = self._places.setdefault(cache, {})
        if layers not in known:
            known[layers] = CachePlace.of([cache.layer(layer) for layer in layers], self._shape)
        return known[layers]

    def _load_layer(self, number: int, layer: LayerWeights) -> None:
        if layer.experts is not None:
            load_experts(self._library, self.handle, number, layer.experts, layer.shared_intermediate)
        if layer.mixer is not None:
            load_mixer(self._library, self.handle, number, layer.mixer)
        if layer.head_gate is not None:
            self._load_linear(number, HEAD_GATE, layer.head_gate)
        if layer.sinks is not None:
            self._load(number, SINKS, layer.sinks)
        for name, role in (LAYER_ROLES | LATENT_ROLES).items():
            part = getattr(layer, name)
            if isinstance(part, Linear | PackedLinear):
                self._load_linear(number, role, part)
            elif part is not None:
                self._load(number, role, part)
        if layer.curve is not None:
            self._load(number, CURVE, layer.curve)
        self._mark(number, layer)

    def _mark(self, number: int, layer: LayerWeights) -> None:
        """Say what a layer has not, or does otherwise."""
        marks = {OTHER_ANGLES: layer.rotary is not None, STILL: layer.is_still}
        marks |= {NO_ATTENTION: not layer.attends, NO_PRODUCTS: layer.up is None}
        for role in (role for role, is_so in marks.items() if is_so):
            self._library.decoder_load(self.handle, number, role, None, None)
        if layer.window is not None:
            self._library.decoder_load(self.handle, number, WINDOW, ctypes.byref(ctypes.c_int32(layer.window)), None)

    def _load_linear(self, layer: int, role: int, linear: AnyLinear) -> None:
        if isinstance(linear, PackedLinear) and (rows := quantized_rows(linear.weight)) is not None:
            bias = None if linear.bias is None else linear.bias.detach().contiguous()
            self._library.decoder_load_quantized(
                self.handle, layer, role, rows.address, None if bias is None else bias.data_ptr()
            )
            return
        found = plain_linear(linear)
        self._load(layer, role, found.weight, found.bias)

    def _load(self, layer: int, role: int, weight: Tensor, bias: Tensor | None = None) -> None:
        weight, bias = weight.detach().contiguous(), None if bias is None else bias.detach().contiguous()
        self._library.decoder_load(
            self.handle, layer, role, weight.data_ptr(), None if bias is None else bias.data_ptr()
        )


def _floats(sizes: DecoderSizes, layer: LayerWeights) -> Iterator[tuple[str, Weight | None, tuple[int, ...]]]:
    """Every tensor of a layer that is float32 in any model, as `shapes` has the others."""
    yield "sinks", layer.sinks, (sizes.num_heads,)
    if layer.experts is not None:
        yield from float_shapes(layer.experts, sizes.hidden)
    if layer.mixer is not None:
        yield from mixer_float_shapes(layer.mixer)


def conv_width_of(layers: Iterable[LayerWeights]) -> int | None:
    """The taps of all mixers' convolutions; None without mixers. Raises ValueError where their sizes differ."""
    sizes = {layer.mixer.sizes for layer in layers if layer.mixer is not None}
    if len(sizes) > 1:
        raise ValueError(f"found mixers of {len(sizes)} sizes, expected one")
    return next(iter(sizes)).conv_width if sizes else None


def checked(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor as the kernels read it. Raises ValueError for one of another dtype, shape or device."""
    _check(name, tensor, shape, dtype)
    return tensor.detach().contiguous()


def check_weights(weights: Iterable[tuple[str, Weight | None, tuple[int, ...]]], dtype: torch.dtype) -> None:
    """Raises ValueError for one with a name that is not of this dtype and its shape."""
    for name, weight, shape in weights:
        if weight is not None:
            _check(name, weight, shape, dtype)


def _check(name: str, weight: Weight, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(weight.shape) != shape or weight.dtype != dtype or weight.device.type != "cpu":
        found = f"{weight.dtype} {list(weight.shape)} on {weight.device}"
        raise ValueError(f"found {name} of {found}, expected {dtype} {list(shape)} on cpu")
