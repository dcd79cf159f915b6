"""Dense decoder in CUDA kernels: ten launches per plain layer into fixed buffers, for graphs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftbatch.worker.kernels.cuda.attention_backends import (
    Attention,
    AttentionKernel,
    MLAAttention,
    TritonAttention,
    new_attention,
    shape_of,
)
from swiftbatch.worker.kernels.cuda.cuda_recurrence import StateBuffers
from swiftbatch.worker.kernels.cuda.cuda_recurrent_layers import CudaRecurrentLayers, scale
from swiftbatch.worker.kernels.cuda.cuda_row_table import CudaRowTable, PageTable, TableLayout
from swiftbatch.worker.kernels.cuda.gemm import LinearKernel, triton_linear
from swiftbatch.worker.kernels.cuda.mla_kernels import CudaMLA
from swiftbatch.worker.kernels.cuda.moe_gemm import CudaExperts
from swiftbatch.worker.kernels.cuda.row_kernels import (
    activate,
    add_norm,
    embed,
    gate_heads,
    norm_heads,
    rope_store,
    softcap_logits,
)
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedLayer, StackedWeights
from swiftbatch.worker.kernels.cuda.tree_attention import KeptLayer
from swiftbatch.worker.kernels.decoder_weights import other_rotary
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, MOST_PARTS, NUM_ROWS, parts_of_depth
from swiftbatch.worker.kernels.kv_codes import cuda_row_width
from swiftbatch.worker.kernels.layer_specs import SEES_ALL, AttentionView
from swiftbatch.worker.kernels.quantized_weights import AnyLinear
from swiftbatch.worker.kernels.rope_cos_sin import angles, kept_as, query_scales
from swiftbatch.worker.kernels.rope_scaling import Rotary

ROW_BUFFERS = (
    *("_state", "_normed", "_whole", "_beside", "_scaled", "_qkv", "_mixed", "_gate_up", "_activated"),
    *("hidden", "features", "logits"),
)


class CudaDecoder:
    """Decoder that runs the rows of its table, with all buffers allocated once.

    Writes `hidden [num_rows, hidden]` in the model's dtype and `logits [num_rows, vocab] float32`.
    """

    feature_layers: tuple[int, ...] = ()
    has_parts = True  # products in Triton leave the next norm to sum their parts
    hidden: Tensor
    _delta: Tensor
    _delta_parts: Tensor | None

    def __init__(
        self,
        weights: StackedWeights,
        arena: Tensor,
        num_positions: int,
        linear: LinearKernel,
        attention: AttentionKernel = TritonAttention,
        pages: PageTable | None = None,
        states: StateBuffers | None = None,
        num_rows: int = NUM_ROWS,
        windowed: tuple[Tensor, PageTable] | None = None,
        turns: Tensor | None = None,
    ) -> None:
        """Take `arena [num_layers, 2, num_slots, num_kv_heads, capacity, row_width]` of attending layers.

        Latent attention has one part in place of two. With `pages` the arena is one pool of pages, and `windowed` is
        the pool of layers with a window. Raises ValueError.
        """
        sizes = self.sizes = weights.sizes
        attending = [layer for layer in weights.layers if layer.attention is not None]
        self._in_windows = [windowed is not None and layer.window is not None for layer in attending]
        _check_arena(arena, weights, self._in_windows.count(False))
        if windowed is not None:
            _check_arena(windowed[0], weights, self._in_windows.count(True))
        if pages is not None:
            arena = arena.expand(-1, -1, len(pages.numbers), -1, -1, -1)  # needs no copy: the stride is 0
        views = [AttentionView(layer.window, sizes.score_softcap or None, layer.sinks) for layer in attending]
        places = _layers_of(arena, None if windowed is None else windowed[0], self._in_windows)
        self._kept = [
            KeptLayer(rows[0], rows[-1], None, view, windowed[1] if windowed is not None and in_window else pages)
            for rows, view, in_window in zip(places, views, self._in_windows, strict=True)
        ]
        capacity = arena.shape[4] if pages is None else pages.capacity
        shape = self._shape = shape_of(sizes, num_rows)
        num_angles = weights.rotary.num_rows(num_positions)
        table = (arena.shape[2], capacity, shape.rows_per_group, num_angles, sizes.vocab, BLOCK)
        self.layout = TableLayout(*table, None if pages is None else pages.page, num_rows, windowed is not None)
        self._weights, self._linear = weights, linear
        self._attending, self._mixing = _numbers_of(weights.layers)
        self.mixers = _recurrent_layers_of(weights, states, self._linear, num_rows)
        self._angles = self._angles_of(np.arange(num_angles), arena.device) if turns is None else turns
        self._add_other_angles(num_angles, num_positions, arena.device)
        self._allocate(arena.device)
        self.attention: Attention = new_attention(attention, shape, self.layout, sizes.scale, arena.device)
        if not isinstance(self.attention, TritonAttention | MLAAttention):
            _check_flash(arena.dtype, sizes.dtype, views)

    def over(self, arena: Tensor, bias: Tensor) -> CudaDecoder:
        """Return the decoder over another arena, with shared buffers; only one of the two decoders may run at a time.

        `bias [num_slots, capacity] float32` is added to scores of prefixes, which may end anywhere.
        """
        _check_arena(arena, self._weights, len(self._in_windows))
        if self.mixers is not None:
            raise ValueError("found layers with a state, whose rows no part of a cache would do for")
        if any(self._in_windows):
            raise ValueError("found layers whose caches forget, where no part of one is all there")
        other = copy.copy(self)
        other._kept = [
            KeptLayer(rows[0], rows[-1], bias, replace(kept.view, window=None))  # entries are not positions
            for rows, kept in zip(arena, self._kept, strict=True)
        ]
        num_slots, capacity = arena.shape[2], arena.shape[4]
        other.layout = replace(self.layout, num_slots=num_slots, capacity=capacity, boundary_step=1, page=None)
        other._allocate_table(arena.device)
        # flash-attn adds no biases, and partial sums follow from a capacity
        other.attention = new_attention(TritonAttention, self._shape, other.layout, self.sizes.scale, arena.device)
        return other

    @property
    def can_be_narrowed(self) -> bool:
        """Return whether a row's bits are the same in forwards of fewer rows, with products in Triton."""
        has_others = self._experts is not None or self._latents is not None or self.mixers is not None
        return isinstance(self.attention, TritonAttention) and not has_others

    def narrowed(self, num_rows: int) -> CudaDecoder:
        """Return the decoder of forwards of fewer rows, in the first rows of the same buffers."""
        assert isinstance(self.attention, TritonAttention)
        other = copy.copy(self)
        other.layout, other.attention = replace(self.layout, num_rows=num_rows), self.attention.narrowed(num_rows)
        for name in ROW_BUFFERS:
            setattr(other, name, getattr(self, name)[:num_rows])
        if self._delta_parts is not None:
            shape = (MOST_PARTS, num_rows, self.sizes.hidden)
            other._delta_parts = self._delta_parts.flatten()[: math.prod(shape)].view(shape)
        other._allocate_table(self.logits.device)
        return other

    @property
    def turns(self) -> tuple[Rotary, Tensor]:
        return self._weights.rotary, self._angles

    @property
    def experts_met(self) -> Tensor | None:
        """Return the counts of `CudaExperts`, or None if the model has no experts."""
        return None if self._experts is None else self._experts.met

    def forward(self, tap: Callable[[int, Tensor], None] | None = None) -> None:
        """Run the rows of `table_buffer`, and write the arena, `hidden` and `logits`.

        `tap` gets each attending layer's rotated queries, `[:, num_kv_heads, heads_per_kv, head_dim]`.
        """
        self.begin()
        for number in range(self.sizes.num_layers):
            self._run_layer(number, tap)
        self.end()

    def hand_out(self, layers: tuple[int, ...]) -> None:
        """Also write `features [num_rows, num_layers * hidden]`, these layers' outputs, in every later forward."""
        self.feature_layers = layers
        self.features = self.hidden.new_zeros(len(self.hidden), len(layers) * self.sizes.hidden)

    def begin(self) -> None:
        table, weights = self._table, self._weights
        embed(table.rows, table.token_ids, weights.embedding, self._state, self.sizes.embedding_scale)

    def end(self) -> None:
        """Launch the final norm and the head."""
        weights, sizes = self._weights, self.sizes
        self._add_norm(self._delta, weights.layers[-1].last_norm, weights.final_norm, self.hidden)
        self._linear(self.hidden, weights.head.weight, weights.head.bias, self.logits)
        self._keep_features(len(weights.layers) - 1)
        if sizes.logit_scale != 1.0:
            self.logits.mul_(sizes.logit_scale)
        if sizes.logit_softcap:
            softcap_logits(self.logits, sizes.logit_softcap)

    def _run_layer(self, number: int, tap: Callable[[int, Tensor], None] | None) -> None:
        layers, layer = self._weights.layers, self._weights.layers[number]
        delta, behind = (self._delta, layers[number - 1].last_norm) if number else (None, None)
        rows, is_mixed = self._state, layer.attention is not None or layer.mixer is not None
        if is_mixed:
            rows = self._add_norm(delta, behind, layer.input_norm, self._normed)
            self._keep_features(number - 1)
            self._mix(number, rows)
            delta, behind = self._delta, layer.output_norm
        if tap is not None and layer.attention is not None:
            tap(self._attending[number], self.attention.heads())
        has_mlp = layer.dense_mlp is not None or layer.experts is not None
        if has_mlp or not is_mixed:
            normed = self._add_norm(delta, behind, layer.mlp_norm, self._normed)
            if not is_mixed:
                self._keep_features(number - 1)
        if has_mlp:
            self._run_mlp(layer, rows if self.sizes.is_parallel else normed)
        elif not is_mixed:
            self._delta = self._whole.zero_()  # the layer has nothing to add

    def _keep_features(self, number: int) -> None:
        """Copy a layer's output, which is in the state once the next norm has added the layer's last part."""
        for place, layer in enumerate(self.feature_layers):
            if layer == number:
                self.features.view(len(self.features), -1, self.sizes.hidden)[:, place].copy_(self._state)

    def _add_other_angles(self, num_angles: int, num_positions: int, device: torch.device) -> None:
        """Add the angles of layers that rotate in another way than most, and the factors of queries."""
        rotary, layers, sizes = self._weights.rotary, self._weights.layers, self.sizes
        self._still = self._angles  # layers without rotation use these
        if any(layer.is_nope for layer in layers):
            self._still = self._angles_of(np.zeros(num_angles, dtype=np.int64), device)
        if (other := other_rotary(layers)) is not None:
            self._other_angles = self._angles_of(np.arange(num_angles), device, other)
        self._query_scales: Tensor | None = None
        if rotary.growth is not None:
            self._query_scales = query_scales(rotary.growth, np.arange(num_positions), sizes.dtype).to(device)

    def _angles_of(self, rows: NDArray[np.int64], device: torch.device, own: Rotary | None = None) -> Tensor:
        """Return rotary angles in the model's dtype, `[num_rows, head_dim]`."""
        rotary, dtype = own or self._weights.rotary, self.sizes.dtype
        return angles(rotary, rows, dtype).to(kept_as(rotary, dtype)).to(device)

    def _add_norm(self, delta: Tensor | None, behind: Tensor | None, front: Tensor | None, normed: Tensor) -> Tensor:
        """Add a sublayer's output, normed if it has an output norm. Return the input of the next sublayer."""
        sizes = self.sizes
        if delta is None and front is None:
            return self._state
        add_norm(
            self._table.rows, self._state, delta, front, sizes.epsilon, normed,
            sizes.residual_scale, behind, sizes.norm_form,
        )  # fmt: skip
        return self._state if front is None else normed

    def _mix(self, number: int, rows: Tensor) -> None:
        layer = self._weights.layers[number]
        if layer.attention is not None:
            self._attend(self._attending[number], layer, rows, *layer.attention)
        if layer.mixer is not None and self.mixers is not None:
            if layer.attention is None:
                self._delta = self._whole
            out = self._whole if layer.attention is None else self._beside
            self.mixers.run(self._state_table, self._mixing[number], layer.mixer, rows, out)
            if layer.attention is not None:
                self._whole.add_(self._beside)

    def _attend(self, number: int, layer: StackedLayer, rows: Tensor, in_front: AnyLinear, behind: AnyLinear) -> None:
        """Attend in the `number`-th attending layer."""
        kept, table = self._kept[number], self._window_table if self._in_windows[number] else self._table
        if self.sizes.attention_in_scale != 1.0:
            rows = torch.mul(rows, self.sizes.attention_in_scale, out=self._scaled)
        self._take_heads(layer, in_front, rows, kept, table)
        self.attention.attend(number, kept, table, self._mixed)
        found = self._mixed
        if self.sizes.gates_heads:
            gate_heads(self._table.rows, self._qkv, found)
        if layer.latent is not None and self._latents is not None:
            found = self._latents.values(layer.latent, found, self._table)
        self._find_delta(found.flatten(1), behind, self.sizes.attention_out_scale, layer.mixer is None)

    def _take_heads(
        self, layer: StackedLayer, in_front: AnyLinear, rows: Tensor, kept: KeptLayer, table: CudaRowTable[Tensor]
    ) -> None:
        attention, sizes = self.attention, self.sizes
        if layer.latent is not None and self._latents is not None:
            self._latents.keep(layer.latent, in_front, rows, table, self._angles, kept.keys, attention.query)
            return
        turns = self._still if layer.is_nope else self._angles if layer.rotary is None else self._other_angles
        self._linear(rows, in_front.weight, in_front.bias, self._qkv)
        first, num_keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        scale(self._qkv[:, first : first + num_keys], sizes.key_scale)
        if layer.joint_norms is not None:
            norm_heads(table.rows, self._qkv, layer.joint_norms, first, sizes.epsilon, sizes.norm_form)
        rope_store(
            self._qkv, turns, layer.qk_norms, sizes.epsilon, table.rows,
            attention.query, kept.keys, kept.values, attention.places(table), sizes.norm_form, sizes.norms_after_rope,
            self._query_scales,
        )  # fmt: skip

    def _run_mlp(self, layer: StackedLayer, rows: Tensor) -> None:
        if layer.dense_mlp is not None:
            wide, down = layer.dense_mlp
            gate_up = _of_width(self._gate_up, wide.weight.shape[0])
            activated = _of_width(self._activated, down.weight.shape[1])
            self._linear(rows, wide.weight, wide.bias, gate_up)
            scale(gate_up[:, : activated.shape[1]], self.sizes.gate_scale)
            activate(self._table.rows, gate_up, activated, self.sizes.activation, layer.curve)
            self._find_delta(activated, down, self.sizes.down_scale, layer.experts is None)
        if layer.experts is not None and self._experts is not None:
            has_shared, self._delta = layer.dense_mlp is not None, self._whole
            self._experts.run(self._table.rows, layer.experts, rows, self._delta, has_shared)

    def _find_delta(self, rows: Tensor, product: AnyLinear, factor: float, is_alone: bool) -> None:
        """Multiply rows for the next norm, which adds the result to the state; nothing else may change parts."""
        self._delta = self._whole
        if self._delta_parts is not None and is_alone and factor == 1.0:
            self._delta = self._delta_parts[: parts_of_depth(product.weight.shape[1])]
        self._linear(rows, product.weight, product.bias, self._delta)
        scale(self._delta, factor)

    def _allocate(self, device: torch.device) -> None:
        """Allocate static buffers of zeros, because padding rows must not hold NaN."""
        sizes, layers, num_rows = self.sizes, self._weights.layers, self.layout.num_rows

        def rows(*shape: int) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=sizes.dtype, device=device)

        self._allocate_table(device)
        self._state, self._normed, self._whole = (rows(sizes.hidden) for _ in range(3))
        self._delta, self._delta_parts = self._whole, None
        if self.has_parts and self._linear is triton_linear:
            self._delta_parts = torch.zeros(MOST_PARTS, num_rows, sizes.hidden, device=device)
        is_beside = any(layer.attention is not None and layer.mixer is not None for layer in layers)
        # layers with both attention and a state use these
        self._beside, self._scaled = (rows(sizes.hidden if is_beside else 0) for _ in range(2))
        latent, num_heads = sizes.latent, (1 + sizes.gates_heads) * sizes.num_heads + 2 * sizes.num_kv_heads
        self._latents = None if latent is None else CudaMLA(sizes, latent, self._linear, device, num_rows)
        self._qkv = rows(num_heads * sizes.head_dim if latent is None else 0)
        self._mixed = rows(sizes.num_heads, sizes.head_dim if latent is None else latent.rank)
        width = max((layer.dense_mlp[1].weight.shape[1] for layer in layers if layer.dense_mlp), default=0)
        self._gate_up, self._activated = rows((1 + sizes.has_gates) * width), rows(width)
        experts = [layer.experts for layer in layers if layer.experts is not None]
        self._experts = None
        if experts:
            parts = (experts, sizes.hidden, sizes.dtype, sizes.activation, device)
            self._experts = CudaExperts(*parts, self._linear, num_rows)
        self.hidden, self.features = rows(sizes.hidden), rows(0)
        self.logits = torch.zeros(num_rows, sizes.vocab, device=device)

    def _allocate_table(self, device: torch.device) -> None:
        num_states = 0 if self.mixers is None else self.mixers.layout.size
        self._use_table(torch.zeros(self.layout.size + num_states, dtype=torch.int32, device=device))

    def _use_table(self, buffer: Tensor) -> None:
        self.table_buffer = buffer
        own = self.table_buffer[: self.layout.size]
        self._table = self._window_table = self.layout.table(own)
        if self.layout.has_window_pages:
            self._window_table = self.layout.window_table(own)
        if self.mixers is not None:
            self._state_table = self.mixers.layout.table(self.table_buffer[self.layout.size :])


def _numbers_of(layers: Sequence[StackedLayer]) -> tuple[list[int], list[int]]:
    """Return each layer's index among the attending layers, and its index among the recurrent layers."""
    attends = [layer.attention is not None for layer in layers]
    mixes = [layer.mixer is not None for layer in layers]
    numbers = range(len(layers))
    return [sum(attends[:number]) for number in numbers], [sum(mixes[:number]) for number in numbers]


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


def _of_width(buffer: Tensor, width: int) -> Tensor:
    return buffer.flatten()[: len(buffer) * width].view(len(buffer), width)


def _layers_of(arena: Tensor, windowed: Tensor | None, in_windows: Sequence[bool]) -> list[Tensor]:
    """Return the rows of each attending layer; a pool counts as one slot."""
    if windowed is None:
        return list(arena)
    pools = windowed.expand(-1, -1, arena.shape[2], -1, -1, -1), arena
    places = [(in_window, in_windows[:number].count(in_window)) for number, in_window in enumerate(in_windows)]
    return [pools[0 if in_window else 1][place] for in_window, place in places]


def _check_flash(kv_dtype: torch.dtype, dtype: torch.dtype, views: list[AttentionView]) -> None:
    if kv_dtype != dtype:
        raise ValueError("found keys and values in 8 bits, which flash-attn does not take; attend with triton")
    if any(view != SEES_ALL for view in views):
        raise ValueError("found windows, soft caps or sinks, which flash-attn does not take; attend with triton")


def _check_arena(arena: Tensor, weights: StackedWeights, num_layers: int) -> None:
    sizes = weights.sizes
    width = cuda_row_width(arena.dtype, sizes.dtype, sizes.head_dim)
    num_parts = 2 if sizes.latent is None else 1
    expected = (num_layers, num_parts, arena.shape[2], sizes.num_kv_heads, arena.shape[4], width or sizes.head_dim)
    if arena.shape != expected or width is None or arena.stride(-1) != 1:
        raise ValueError(f"found an arena of {arena.dtype} {list(arena.shape)}, expected {sizes.dtype} {expected}")
