"""Decoder in CUDA kernels: a list of launches over fixed buffers, for graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftbatch.worker.kernels.cuda.attention_backends import (
    ATTENTION_KERNELS,
    Attention,
    RowsInOrder,
    TritonAttention,
    new_attention,
    own_attention,
    own_shape_of,
    shape_of,
)
from swiftbatch.worker.kernels.cuda.block_kernels import CudaBlocks
from swiftbatch.worker.kernels.cuda.cuda_recurrence import StateBuffers
from swiftbatch.worker.kernels.cuda.cuda_recurrent_layers import CudaRecurrentLayers
from swiftbatch.worker.kernels.cuda.cuda_row_table import CudaRowTable, PageTable, TableLayout
from swiftbatch.worker.kernels.cuda.decoder_buffers import DecoderBuffers, LayerAngles
from swiftbatch.worker.kernels.cuda.device_caches import DeviceCaches, check_buffer
from swiftbatch.worker.kernels.cuda.gemm import LINEAR_KERNELS, LinearKernel, triton_linear
from swiftbatch.worker.kernels.cuda.indexer_kernels import CudaIndexer
from swiftbatch.worker.kernels.cuda.layer_launches import Delta, LayerLaunches, Tables, Tap, scaled
from swiftbatch.worker.kernels.cuda.mla_kernels import CudaMLA, MLAShape
from swiftbatch.worker.kernels.cuda.moe_gemm import CudaExperts
from swiftbatch.worker.kernels.cuda.peers import Launch, meet_all
from swiftbatch.worker.kernels.cuda.row_kernels import embed, softcap_logits
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedLayer, StackedWeights
from swiftbatch.worker.kernels.cuda.tree_attention import AttentionShape, KeptLayer
from swiftbatch.worker.kernels.cuda.wide_attention import WideShape
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes
from swiftbatch.worker.kernels.gpu_kernel_choice import DEFAULT_KERNELS, CudaKernels
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, LayerHeads
from swiftbatch.worker.kernels.layer_specs import SEES_ALL, AttentionView
from swiftbatch.worker.kernels.rope_scaling import Rotary


class CudaDecoder:
    """Decoder that runs the rows of its table, with all buffers allocated once.

    Writes `hidden [num_rows, hidden]` in the model's dtype and `logits [num_rows, vocab] float32`.
    """

    has_parts = True  # the next norm sums the parts of products in Triton

    def __init__(
        self,
        weights: StackedWeights,
        caches: DeviceCaches,
        kernels: CudaKernels = DEFAULT_KERNELS,
        turns: Tensor | None = None,
    ) -> None:
        """Take the `turns` of a decoder that rotates alike. Raises ValueError for caches that do not fit."""
        sizes, num_rows, device = weights.sizes, kernels.num_rows, caches.buffer.device
        linear = LINEAR_KERNELS[kernels.linear]
        self.sizes, self._weights, self._linear = sizes, weights, linear
        self._has_adapters = any(layer.adapters for layer in weights.layers)
        self._shape, own_shape = shape_of(sizes, num_rows), _own_shape(weights, num_rows)
        self.layout = self._layout_of(caches, own_shape)
        self.mixers = _recurrent_layers_of(weights, caches.states, linear, num_rows)
        in_windows, kept = _kept_layers(weights, caches)
        if kernels.attention == "flash":
            _check_flash(caches.buffer.dtype, sizes.dtype, kept)
        own = None if own_shape is None else own_attention(own_shape, self.layout, sizes.scale, device)
        kernel = ATTENTION_KERNELS[kernels.attention]
        self._layers = LayerLaunches(
            weights,
            linear,
            new_attention(kernel, self._shape, self.layout, sizes.scale, device, own),
            kept,
            in_windows,
            DecoderBuffers.empty(weights, num_rows, self.has_parts and linear is triton_linear, device),
            self._new_tables(device),
            LayerAngles.of(weights, caches.num_positions, device, turns),
            None if sizes.latent is None else CudaMLA(sizes, sizes.latent, linear, device, num_rows),
            _indexer_of(weights, linear, device, caches.capacity, num_rows),
            _experts_of(weights, linear, device, num_rows),
            self.mixers,
            own=own,
            blocks=self._blocks_of(caches),
        )

    def over(self, arena: Tensor, bias: Tensor) -> CudaDecoder:
        """Return the decoder over another arena, with shared buffers; only one of the two decoders may run at a time.

        `bias [num_slots, capacity] float32` is added to scores of prefixes, which may end anywhere.
        """
        if self._layers.own is not None or self._layers.blocks is not None:
            raise ValueError("found layers with heads of their own, which no part of a cache has")
        check_buffer(arena, self.sizes, len(self._layers.kept))
        if self.mixers is not None:
            raise ValueError("found layers with a state, whose rows no part of a cache would do for")
        if any(self._layers.in_windows):
            raise ValueError("found layers whose caches forget, where no part of one is all there")
        kept = [
            KeptLayer(rows[0], rows[-1], bias, replace(kept.view, window=None))  # entries are not positions
            for rows, kept in zip(arena, self._layers.kept, strict=True)
        ]
        layout = replace(self.layout, num_slots=arena.shape[2], capacity=arena.shape[4], boundary_step=1, page=None)
        shape = self._shape.seeing_all() if isinstance(self._shape, MLAShape) else self._shape
        # flash-attn adds no biases, and partial sums follow from a capacity
        attention = new_attention(TritonAttention, shape, layout, self.sizes.scale, arena.device)
        return self._with(layout, replace(self._layers, kept=kept, attention=attention, indexer=None))

    @staticmethod
    def join(ranks: Sequence[CudaDecoder]) -> None:
        """Let the decoders of all ranks compute forwards together. The first rank gets the logits."""
        logits = ranks[0].logits
        for decoder, peers in zip(ranks, meet_all([each._met_buffers() for each in ranks]), strict=True):
            decoder._layers = replace(
                decoder._layers, buffers=replace(decoder.buffers, logits=logits), peers=peers
            )  # fmt: skip

    def _met_buffers(self) -> list[Tensor]:
        """Return the buffers in which other GPUs write."""
        buffers, experts = self.buffers, self._layers.experts
        assert buffers.delta_parts is not None
        return [
            *(buffers.state, buffers.normed, buffers.hidden, buffers.delta_parts),
            *([] if experts is None else [experts.results]),
        ]

    def take_table(self, buffer: Tensor) -> None:
        """Take the row table of later forwards from a buffer `[layout.size] int32`."""
        self._layers = replace(self._layers, tables=self._tables_in(buffer))

    @property
    def can_be_narrowed(self) -> bool:
        """Return whether a row's bits are the same in forwards of fewer rows, which flash-attn's may not be."""
        return self._linear is triton_linear and isinstance(self.attention, RowsInOrder)

    def narrowed(self, num_rows: int) -> CudaDecoder:
        """Return the decoder of forwards of fewer rows, in the first rows of the same buffers."""
        layers, other = self._layers, copy.copy(self)
        assert isinstance(layers.attention, RowsInOrder)
        other.mixers = None if self.mixers is None else self.mixers.narrowed(num_rows)
        narrowed = replace(
            layers,
            attention=layers.attention.narrowed(num_rows),
            own=None if layers.own is None else layers.own.narrowed(num_rows),
            buffers=layers.buffers.narrowed(num_rows),
            latents=None if layers.latents is None else layers.latents.narrowed(num_rows),
            indexer=None if layers.indexer is None else layers.indexer.narrowed(num_rows),
            blocks=None if layers.blocks is None else layers.blocks.narrowed(num_rows),
            experts=None if layers.experts is None else layers.experts.narrowed(num_rows),
            mixers=other.mixers,
        )
        return other._with(replace(self.layout, num_rows=num_rows), narrowed)

    @property
    def attention(self) -> Attention:
        return self._layers.attention

    @property
    def buffers(self) -> DecoderBuffers:
        return self._layers.buffers

    @property
    def hidden(self) -> Tensor:
        return self.buffers.hidden

    @property
    def logits(self) -> Tensor:
        return self.buffers.logits

    @property
    def token_ids(self) -> Tensor:
        """Return the tokens of the next forward's rows in its table, `[num_rows] int32`."""
        return self._table.token_ids

    @property
    def turns(self) -> tuple[Rotary, Tensor]:
        return self._weights.rotary, self._layers.angles.usual

    @property
    def experts_met(self) -> Tensor | None:
        """Return the counts of `CudaExperts`, or None if the model has no experts."""
        return None if self._layers.experts is None else self._layers.experts.met

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self._layers.feature_layers

    def hand_out(self, layers: tuple[int, ...]) -> None:
        """Also write `features [num_rows, num_layers * hidden]`, these layers' outputs, in every later forward."""
        features = self.buffers.state.new_zeros(len(self.buffers.state), len(layers) * self.sizes.hidden)
        self._layers = replace(self._layers, buffers=replace(self.buffers, features=features), feature_layers=layers)

    def forward(self, tap: Tap | None = None) -> None:
        """Run the rows of `table_buffer`, and write the caches, `hidden` and `logits`; see `of_layers` for `tap`."""
        for launch in self.launches(tap):
            launch()

    def launches(self, tap: Tap | None = None) -> Iterator[Launch]:
        yield from self._begin()
        delta = yield from self._layers.of_layers(tap)
        yield from self._end(delta)

    def _begin(self) -> Iterator[Launch]:
        table, weights, sizes = self._table, self._weights, self.sizes
        yield partial(embed, table.rows, table.token_ids, weights.embedding, self.buffers.state, sizes.embedding_scale)
        if (ple := weights.ple) is not None:
            projection = ple.projection
            yield partial(self._linear, self.buffers.state, projection.weight, projection.bias, self.buffers.ple)

    def _end(self, delta: Delta) -> Iterator[Launch]:
        """Yield the launches of the final norm and the head."""
        weights, sizes, buffers = self._weights, self.sizes, self.buffers
        yield from self._layers.add(delta, weights.final_norm, buffers.hidden)
        own = buffers.logits[:, weights.first_token : weights.first_token + weights.head.weight.shape[0]]
        yield partial(self._linear, buffers.hidden, weights.head.weight, weights.head.bias, own)
        yield from self._layers.keep_features(len(weights.layers) - 1)
        yield from self._layers.meet()
        if weights.first_token:
            return
        yield from scaled(buffers.logits, sizes.logit_scale)
        if sizes.logit_softcap:
            yield partial(softcap_logits, buffers.logits, sizes.logit_softcap)

    @property
    def _table(self) -> CudaRowTable[Tensor]:
        return self._layers.tables.rows

    def _with(self, layout: TableLayout, layers: LayerLaunches) -> CudaDecoder:
        """Return a decoder with a table of its own."""
        other = copy.copy(self)
        other.layout = layout
        other._layers = replace(layers, tables=other._new_tables(self.table_buffer.device))
        return other

    def _blocks_of(self, caches: DeviceCaches) -> CudaBlocks | None:
        """Return the indexers of blocks, or None without any. Raises ValueError if kernels do not support them."""
        heads, shape = _own_heads(self._weights), self._shape
        if heads is None or heads.blocks is None or isinstance(shape, MLAShape):
            return None
        if fault := heads.fault(self.sizes.num_heads, self.sizes.head_dim) or heads.gpu_fault(self.sizes.head_dim):
            raise ValueError(fault)
        return CudaBlocks(shape, heads.blocks, caches.capacity, caches.buffer.device)

    def _layout_of(self, caches: DeviceCaches, own: AttentionShape | WideShape | None) -> TableLayout:
        num_angles, rows_per_group = self._weights.rotary.num_rows(caches.num_positions), self._shape.rows_per_group
        if isinstance(own, AttentionShape):
            rows_per_group = min(rows_per_group, own.rows_per_group)
        sizes = (caches.num_slots, caches.capacity, rows_per_group, num_angles, self.sizes.vocab, BLOCK)
        page = None if caches.pages is None else caches.pages.page
        return TableLayout(*sizes, page, self._shape.num_rows, caches.windowed is not None)

    def _new_tables(self, device: torch.device) -> Tables:
        num_states = 0 if self.mixers is None else self.mixers.layout.size
        num_adapted = self.layout.num_rows if self._has_adapters else 0
        size = self.layout.size + num_states + num_adapted
        return self._tables_in(torch.zeros(size, dtype=torch.int32, device=device))

    def _tables_in(self, buffer: Tensor) -> Tables:
        """Take the tables of later forwards from a buffer."""
        self.table_buffer = buffer
        own, of_states = buffer[: self.layout.size], buffer[self.layout.size :]
        adapters = buffer[-self.layout.num_rows :] if self._has_adapters else None
        rows = self.layout.table(own)
        windows = self.layout.window_table(own) if self.layout.has_window_pages else rows
        states = None if self.mixers is None else self.mixers.layout.table(of_states)
        return Tables(rows, windows, states, adapters)

    def fill_adapters(self, buffer: NDArray[np.int32], rows: Iterable[tuple[int, int]]) -> None:
        """Write the adapters of consecutive rows, `(num_rows, adapter)`, into a table's buffer."""
        if self._has_adapters:
            numbers = [adapter for num_rows, adapter in rows for _ in range(num_rows)]
            own = buffer[-self.layout.num_rows :]
            own[: len(numbers)], own[len(numbers) :] = numbers, 0


def _own_shape(weights: StackedWeights, num_rows: int) -> AttentionShape | WideShape | None:
    """Return the shape of layers with heads of their own, or None; indexers of blocks bring their own attention."""
    heads = _own_heads(weights)
    return None if heads is None or heads.blocks is not None else own_shape_of(weights.sizes, heads, num_rows)


def _own_heads(weights: StackedWeights) -> LayerHeads | None:
    """Return the heads that layers have of their own, or None. Raises ValueError if these differ."""
    found = {layer.heads for layer in weights.layers if layer.heads is not None}
    if len(found) > 1:
        raise ValueError(f"found layers with {len(found)} forms of heads of their own, expected one at most")
    return found.pop() if found else None


def _kept_layers(weights: StackedWeights, caches: DeviceCaches) -> tuple[list[bool], list[KeptLayer]]:
    """Return whether each attending layer is in the windows' pool, and its caches."""
    layers = dict(enumerate(weights.layers))
    is_in_windows = {
        number: caches.windowed is not None and layer.window is not None
        for number, layer in layers.items()
        if layer.keeps_keys
    }
    places = dict(zip(is_in_windows, caches.layers(weights.sizes, [*is_in_windows.values()]), strict=True))
    in_windows, kept = list[bool](), list[KeptLayer]()
    for number, layer in layers.items():
        if layer.attention is not None:
            source = number if layer.shared_keys is None else layer.shared_keys
            in_windows.append(is_in_windows[source])
            kept.append(_kept_layer(weights.sizes, layer, *places[source]))
    return in_windows, kept


def _kept_layer(sizes: DecoderSizes, layer: StackedLayer, rows: Tensor, pages: PageTable | None) -> KeptLayer:
    """Return the caches of a layer; the last head of an indexer's layer has index keys."""
    view = AttentionView(layer.window, sizes.score_softcap or None, layer.sinks)
    if layer.index_norms is None:
        return KeptLayer(rows[0], rows[-1], None, view, pages)
    heads, (keys, values) = rows[:, :, : sizes.num_kv_heads], rows[:, :, sizes.num_kv_heads :]
    return KeptLayer(heads[0], heads[1], None, view, pages, (keys, values))


def _recurrent_layers_of(
    weights: StackedWeights, states: StateBuffers | None, linear: LinearKernel, num_rows: int
) -> CudaRecurrentLayers | None:
    """Return the recurrent layers, or None if the model has none.

    Raises ValueError for states without mixers, and for mixers without states or of different sizes.
    """
    found = {layer.mixer.sizes for layer in weights.layers if layer.mixer is not None}
    if len(found) != (states is not None):
        raise ValueError(f"found mixers of {len(found)} sizes, and {'some' if states else 'no'} states")
    return None if states is None else CudaRecurrentLayers(found.pop(), states, weights.sizes.dtype, linear, num_rows)


def _indexer_of(
    weights: StackedWeights, linear: LinearKernel, device: torch.device, capacity: int, num_rows: int
) -> CudaIndexer | None:
    """Return the indexers, or None if the model has none. Raises ValueError if the first layer has none."""
    sizes = weights.sizes
    if sizes.indexer is None:
        return None
    first = weights.layers[0].latent
    if first is None or first.indexer is None:
        raise ValueError("found a first layer without an indexer, expected one whose choice others use")
    return CudaIndexer(sizes, sizes.indexer, linear, device, capacity, num_rows)


def _experts_of(
    weights: StackedWeights, linear: LinearKernel, device: torch.device, num_rows: int
) -> CudaExperts | None:
    sizes, layers = weights.sizes, [layer.experts for layer in weights.layers if layer.experts is not None]
    if not layers:
        return None
    return CudaExperts(layers, sizes.hidden, sizes.dtype, sizes.activation, device, linear, num_rows)


def _check_flash(kv_dtype: torch.dtype, dtype: torch.dtype, kept: Sequence[KeptLayer]) -> None:
    if kv_dtype != dtype:
        raise ValueError("found keys and values in 8 bits, which flash-attn does not take; attend with triton")
    if any(each.index_cache is not None for each in kept):
        raise ValueError("found indexers of blocks, whose choice flash-attn does not take; attend with triton")
    if any(each.view != SEES_ALL for each in kept):
        raise ValueError("found windows, soft caps or sinks, which flash-attn does not take; attend with triton")
