"""A layer as a list of launches, each bound to its weights and to fixed buffers: ten for a plain layer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from swiftbatch.worker.kernels.cuda.attention_backends import Attention, TritonAttention
from swiftbatch.worker.kernels.cuda.block_kernels import CudaBlocks
from swiftbatch.worker.kernels.cuda.cuda_recurrence import StateTable
from swiftbatch.worker.kernels.cuda.cuda_recurrent_layers import CudaRecurrentLayers
from swiftbatch.worker.kernels.cuda.cuda_row_table import CudaRowTable
from swiftbatch.worker.kernels.cuda.decoder_buffers import DecoderBuffers, LayerAngles
from swiftbatch.worker.kernels.cuda.gemm import LinearKernel, triton_linear
from swiftbatch.worker.kernels.cuda.indexer_kernels import CudaIndexer
from swiftbatch.worker.kernels.cuda.lora_kernels import StackedAdapters, add_adapted
from swiftbatch.worker.kernels.cuda.mla_kernels import CudaMLA
from swiftbatch.worker.kernels.cuda.moe_gemm import CudaExperts
from swiftbatch.worker.kernels.cuda.peers import Launch, Peers
from swiftbatch.worker.kernels.cuda.ple_kernels import gate_embeddings
from swiftbatch.worker.kernels.cuda.row_kernels import activate, add_norm, gate_heads, norm_heads, rope_store
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedExperts, StackedLayer, StackedWeights
from swiftbatch.worker.kernels.cuda.tree_attention import KeptLayer, first_of
from swiftbatch.worker.kernels.kernel_sizes import LayerHeads, depth_of_part, parts_of_depth
from swiftbatch.worker.kernels.layer_specs import NormForm
from swiftbatch.worker.kernels.quantized_weights import AnyLinear

Tap = Callable[[int, Tensor], None]


class Tables(NamedTuple):
    """Rows of a forward, for all kernels, for layers in the windows' pool, for layers with a state, and adapters."""

    rows: CudaRowTable[Tensor]
    windows: CudaRowTable[Tensor]
    states: StateTable[Tensor] | None
    adapters: Tensor | None = None  # [num_rows] int32: the number of each row's LoRA adapter, or 0


class Delta(NamedTuple):
    """A sublayer's result, which the next norm adds to the state, after a norm of its own if it has one.

    The state is then multiplied by `scale`.
    """

    rows: Tensor | None = None  # [num_rows, hidden], or in parts
    norm: Tensor | None = None
    scale: float | None = None


Launches = Generator[Launch, None, Tensor]
"""Launches in order; returns the buffer with the result."""


@dataclass(frozen=True)
class LayerLaunches:
    """The launches of all layers, over what the layers share."""

    weights: StackedWeights
    linear: LinearKernel
    attention: Attention
    kept: Sequence[KeptLayer]  # caches of attending layers
    in_windows: Sequence[bool]  # says which of them are in the windows' pool
    buffers: DecoderBuffers
    tables: Tables
    angles: LayerAngles
    latents: CudaMLA | None
    indexer: CudaIndexer | None  # None: rows attend to all entries
    experts: CudaExperts | None
    mixers: CudaRecurrentLayers | None
    feature_layers: tuple[int, ...] = ()
    peers: Peers | None = None  # of a decoder on several GPUs
    own: TritonAttention | None = None  # of layers with heads of their own
    blocks: CudaBlocks | None = None  # of layers whose indexers choose blocks

    def of_layers(self, tap: Tap | None) -> Generator[Launch, None, Delta]:
        """Yield the launches of all layers; return the last result, which is not added yet.

        `tap` gets each attending layer's rotated queries, `[:, num_kv_heads, heads_per_kv, head_dim]`.
        """
        delta, num_attending, num_mixing = Delta(), 0, 0
        for number, layer in enumerate(self.weights.layers):
            delta = yield from self._of_layer(number, num_attending, num_mixing, delta, tap)
            num_attending += layer.attention is not None
            num_mixing += layer.mixer is not None
        return delta

    def add(self, delta: Delta, front: Tensor | None, normed: Tensor) -> Launches:
        """Add a result to the state; return the state after its norm `front`, or itself without one."""
        state, sizes = self.buffers.state, self.weights.sizes
        if delta.rows is not None or front is not None:
            yield partial(
                add_norm, self.tables.rows.rows, state, delta.rows, front, sizes.epsilon, normed,
                sizes.residual_scale, delta.norm, sizes.norm_form, delta.scale, self.peers,
            )  # fmt: skip
            yield from self.meet()
        return state if front is None else normed

    def meet(self) -> Iterator[Launch]:
        if self.peers is not None:
            yield self.peers.meeting

    def keep_features(self, number: int) -> Iterator[Launch]:
        """Copy a layer's output, which is in the state once the next norm has added the layer's last result."""
        features, state = self.buffers.features, self.buffers.state
        for place, layer in enumerate(self.feature_layers):
            if layer == number:
                yield partial(features.view(len(features), -1, state.shape[1])[:, place].copy_, state)

    def _of_layer(
        self, number: int, attending: int, mixing: int, delta: Delta, tap: Tap | None
    ) -> Generator[Launch, None, Delta]:
        """Yield the launches of a layer, the `attending`-th with attention and the `mixing`-th with a state."""
        layer, buffers, rows = self.weights.layers[number], self.buffers, self.buffers.state
        has_features = False
        if layer.attention is not None or layer.mixer is not None:
            rows = yield from self.add(delta, layer.input_norm, buffers.normed)
            yield from self.keep_features(number - 1)
            has_features = True
            delta = Delta((yield from self._mix(layer, attending, mixing, rows)), layer.output_norm)
        if tap is not None and layer.attention is not None:
            yield partial(tap, attending, self._attention_of(layer).heads())
        if layer.dense_mlp is not None or layer.experts is not None:
            normed = yield from self.add(delta, layer.mlp_norm, buffers.normed)
            if not has_features:
                yield from self.keep_features(number - 1)
            read = rows if self.weights.sizes.is_parallel else normed
            delta = Delta((yield from self._of_mlp(layer, read)), layer.down_norm, layer.layer_scale)
            return delta if layer.ple is None else (yield from self._add_embedding(layer, number, delta))
        if not has_features:  # the layer has nothing to add
            yield from self.add(delta, None, buffers.normed)
            yield from self.keep_features(number - 1)
            return Delta()
        return delta

    def _mix(self, layer: StackedLayer, attending: int, mixing: int, rows: Tensor) -> Launches:
        buffers, out = self.buffers, self.buffers.delta
        if layer.attention is not None:
            out = yield from self._attend(layer, attending, rows, *layer.attention)
        if layer.mixer is not None and self.mixers is not None and self.tables.states is not None:
            found = out if layer.attention is None else buffers.beside
            yield partial(self.mixers.run, self.tables.states, mixing, layer.mixer, rows, found)
            yield from self.meet()  # the next norm overwrites rows that other GPUs may still read
            if layer.attention is not None:
                yield partial(out.add_, found)
        return out

    def _attend(
        self, layer: StackedLayer, number: int, rows: Tensor, in_front: AnyLinear, behind: AnyLinear
    ) -> Launches:
        """Attend in the `number`-th attending layer."""
        buffers, sizes, kept = self.buffers, self.weights.sizes, self.kept[number]
        attention = self._attention_of(layer)
        table = self.tables.windows if self.in_windows[number] else self.tables.rows
        if sizes.attention_in_scale != 1.0:
            yield partial(torch.mul, rows, sizes.attention_in_scale, out=buffers.scaled)
            rows = buffers.scaled
        if layer.latent is not None and self.latents is not None:
            given = rows, table, self.angles.usual, kept.keys, attention.query
            yield partial(self.latents.keep, layer.latent, in_front, *given)
            if self.indexer is not None:
                if layer.latent.indexer is not None:
                    known = self.latents.vector, rows, table, self.angles.usual, kept
                    yield partial(self.indexer.choose, layer.latent.indexer, *known)
                kept, table = self.indexer.chosen(kept, table)
        else:
            yield from self._take_heads(layer, in_front, rows, kept, table)
        if self.blocks is not None and kept.index_cache is not None:
            qkv = of_width(buffers.qkv, in_front.weight.shape[0])
            yield from self._attend_to_blocks(self.blocks, layer, qkv, kept, kept.index_cache, table)
        else:
            yield partial(attention.attend, number, kept, table, buffers.mixed)
        if layer.latent is not None and self.latents is not None:
            yield partial(self.latents.find_values, layer.latent, buffers.mixed, self.tables.rows)
            found = self.latents.found
        else:
            found = of_width(buffers.mixed, behind.weight.shape[1])
        if sizes.gates_heads:
            yield partial(gate_heads, self.tables.rows.rows, of_width(buffers.qkv, in_front.weight.shape[0]), found)
        if layer.shared is not None:
            return (yield from self._multiply_together(found, behind, layer.shared.output))
        adapters = layer.adapters.get("output")
        return (yield from self._multiply(found, behind, sizes.attention_out_scale, layer.mixer is None, adapters))

    def _attend_to_blocks(
        self, blocks: CudaBlocks, layer: StackedLayer, qkv: Tensor, kept: KeptLayer, cache: tuple[Tensor, Tensor],
        table: CudaRowTable[Tensor],
    ) -> Iterator[Launch]:  # fmt: skip
        """Store index keys, choose blocks, and attend to them."""
        sizes, attention, (keys, values) = self.weights.sizes, self.attention, cache
        assert isinstance(attention, TritonAttention)
        last = (sizes.num_kv_heads + 1) * sizes.head_dim
        yield partial(
            rope_store, qkv[:, -last:], self.angles.of_layer(layer), layer.index_norms,
            sizes.epsilon, table.rows, blocks.index_queries, keys, values, None, sizes.norm_form,
            sizes.norms_after_rope, num_stored=1,
        )  # fmt: skip
        yield partial(blocks.choose, kept, keys, table)
        given = attention.query, kept, table, attention.scratch
        yield partial(blocks.attend, *given, self.buffers.mixed, sizes.scale)

    def _take_heads(
        self, layer: StackedLayer, in_front: AnyLinear, rows: Tensor, kept: KeptLayer, table: CudaRowTable[Tensor]
    ) -> Iterator[Launch]:
        """Find queries, keys and values; rotate and store them."""
        attention, sizes = self._attention_of(layer), self.weights.sizes
        heads = layer.heads or LayerHeads(sizes.num_kv_heads, sizes.head_dim)
        qkv, first = of_width(self.buffers.qkv, in_front.weight.shape[0]), sizes.num_heads * heads.head_dim
        end = first + heads.num_kv_heads * heads.head_dim  # of keys
        num_values = heads.num_kv_heads * (sizes.value_dim or heads.head_dim)
        yield partial(self.linear, rows, in_front.weight, in_front.bias, qkv)
        yield from self._adapt(layer.adapters.get("query_key_value"), rows, qkv)
        yield from scaled(qkv[:, first:end], sizes.key_scale)
        yield from scaled(qkv[:, end : end + num_values], sizes.value_scale)
        if layer.joint_norms is not None:
            yield partial(norm_heads, table.rows, qkv, layer.joint_norms, first, sizes.epsilon, sizes.norm_form)
        yield partial(
            rope_store, qkv, self.angles.of_layer(layer), layer.qk_norms, sizes.epsilon, table.rows, attention.query,
            kept.keys, kept.values, attention.places(table), sizes.norm_form, sizes.norms_after_rope,
            self.angles.query_scales, sizes.norms_values, layer.num_stored,
            heads.head_dim // sizes.head_dim, sizes.value_dim,
        )  # fmt: skip

    def _of_mlp(self, layer: StackedLayer, rows: Tensor) -> Launches:
        buffers, sizes, table, out = self.buffers, self.weights.sizes, self.tables.rows, self.buffers.delta
        if layer.dense_mlp is not None:
            wide, down = layer.dense_mlp
            gate_up = of_width(buffers.gate_up, wide.weight.shape[0])
            activated = of_width(buffers.activated, down.weight.shape[1])
            yield partial(self.linear, rows, wide.weight, wide.bias, gate_up)
            yield from self._adapt(layer.adapters.get("gate_up"), rows, gate_up)
            yield from scaled(gate_up[:, : activated.shape[1]], sizes.gate_scale)
            gates = sizes.activation, layer.curve, sizes.gate_limit, sizes.gate_slope
            yield partial(activate, table.rows, gate_up, activated, *gates)
            if layer.shared is not None and layer.experts is None:
                return (yield from self._multiply_together(activated, down, layer.shared.down))
            adapters = layer.adapters.get("down")
            out = yield from self._multiply(activated, down, sizes.down_scale, layer.experts is None, adapters)
        yield from self._norm_beside(out, layer.shared_norm, out)
        if layer.experts is not None and self.experts is not None:
            yield from self._of_experts(self.experts, layer.experts, rows, out, layer.dense_mlp is not None)
        return out

    def _add_embedding(self, layer: StackedLayer, number: int, delta: Delta) -> Generator[Launch, None, Delta]:
        """Add the MLP's result; return what the layer's own embedding of the rows' tokens adds to them."""
        buffers, sizes, table, of_all = self.buffers, self.weights.sizes, self.tables.rows, self.weights.ple
        assert layer.ple is not None
        assert of_all is not None
        rows = yield from self.add(delta._replace(scale=None), None, buffers.normed)
        gates, gated = (of_width(each, sizes.ple_dim) for each in (buffers.gate_up, buffers.activated))
        yield partial(self.linear, rows, layer.ple.gate.weight, layer.ple.gate.bias, gates)
        given = (table.rows, table.token_ids, buffers.ple, of_all.table, layer.ple.norm, number, sizes)
        yield partial(gate_embeddings, *given, gates, layer.curve, gated)
        out = yield from self._multiply(gated, layer.ple.output, 1.0, True, None)
        return Delta(out, layer.ple.output_norm, layer.layer_scale)

    def _of_experts(
        self, launches: CudaExperts, experts: StackedExperts, rows: Tensor, out: Tensor, has_shared: bool
    ) -> Iterator[Launch]:
        """Write the experts' sum, or add it to the result of what all rows meet."""
        buffers, table, sizes = self.buffers, self.tables.rows.rows, self.weights.sizes
        if (scale := experts.router_scale) is not None:
            rows, given = buffers.normed, (buffers.state, None, scale, sizes.epsilon, buffers.normed)
            yield partial(add_norm, table, *given, form=NormForm.TWICE)
            yield from scaled(rows, sizes.hidden**-0.5)
        yield partial(launches.choose, table, experts, rows)
        yield from self._norm_beside(buffers.state, experts.front_norm, buffers.normed)
        if experts.behind_norm is None:
            yield from launches.launches(table, experts, rows, out, has_shared, self.peers)
            return
        yield from launches.launches(table, experts, rows, buffers.beside, False, self.peers)
        sums = (out, buffers.beside, None, sizes.epsilon, out)
        yield partial(add_norm, table, *sums, behind=experts.behind_norm, form=sizes.norm_form)

    def _norm_beside(self, rows: Tensor, norm: Tensor | None, out: Tensor) -> Iterator[Launch]:
        """Norm rows, if there is a norm."""
        sizes = self.weights.sizes
        if norm is not None:
            yield partial(add_norm, self.tables.rows.rows, rows, None, norm, sizes.epsilon, out, form=sizes.norm_form)

    def _attention_of(self, layer: StackedLayer) -> Attention:
        return self.attention if layer.heads is None or self.own is None else self.own

    def _multiply(
        self, rows: Tensor, product: AnyLinear, factor: float, is_alone: bool, adapters: StackedAdapters | None
    ) -> Launches:
        """Multiply rows for the next norm. A result that nothing else changes may stay in parts of the depth."""
        out, parts = self.buffers.delta, self.buffers.delta_parts
        if parts is not None and is_alone and factor == 1.0:
            out = parts[: parts_of_depth(product.weight.shape[1])]
        yield partial(self.linear, rows, product.weight, product.bias, out)
        yield from self._adapt(adapters, rows, out if out.dim() == 2 else out[0])
        yield from scaled(out, factor)
        return out

    def _multiply_together(self, rows: Tensor, product: AnyLinear, depth: int) -> Launches:
        """Multiply the own parts of a product of all GPUs. The GPU that owns a row gets its sums of all parts."""
        parts, peers, num_parts = self.buffers.delta_parts, self.peers, parts_of_depth(depth)
        assert parts is not None
        assert peers is not None
        own, distances = parts[peers.rank.share_of(num_parts)], peers.of(parts)
        yield partial(triton_linear, rows, product.weight, product.bias, own, depth_of_part(depth), distances)
        yield peers.meeting
        return parts[:num_parts]

    def _adapt(self, adapters: StackedAdapters | None, rows: Tensor, out: Tensor) -> Iterator[Launch]:
        """Add what the rows' LoRA adapters add to a product."""
        if adapters is not None and self.tables.adapters is not None:
            yield partial(add_adapted, self.tables.adapters, rows, adapters, self.buffers.lowered, out)


def scaled(rows: Tensor, factor: float) -> Iterator[Launch]:
    """Scale in place, rounding once."""
    if factor != 1.0:
        yield partial(rows.mul_, factor)


def of_width(buffer: Tensor, width: int) -> Tensor:
    return first_of(buffer, len(buffer), width)
