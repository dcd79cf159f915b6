"""A dense decoder as CUDA kernels: ten launches a layer, into buffers that never move, for a graph to replay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from worker.kernels.angles import angles
from worker.kernels.cuda.attention import AttentionShape, Scratch, attend
from worker.kernels.cuda.layers import add_norm, embed, silu_mul
from worker.kernels.cuda.linear import LinearKernel
from worker.kernels.cuda.rotary import rope_store
from worker.kernels.cuda.stacked import StackedLayer, StackedWeights
from worker.kernels.cuda.table import NUM_ROWS, TableLayout


class CudaDecoder:
    """Runs the rows of its table; what it reads and writes is allocated here, once.

    A row's `hidden [NUM_ROWS, hidden]`, of the model's dtype, and `logits [NUM_ROWS, vocab] float32` follow from the
    row's own tokens, whatever shares the table; those of padding rows mean nothing.
    """

    def __init__(
        self,
        weights: StackedWeights,
        arena: Tensor,
        num_positions: int,
        num_splits: int,
        linear: LinearKernel,
        bias: Tensor | None = None,
        reduce: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Rows see entries of `arena [num_layers, 2, num_slots, num_kv_heads, capacity, head_dim]`, on its device.

        `bias [num_slots, capacity] float32` is added to scores of prefixes. `reduce` sums a layer's part of the
        outputs `[NUM_ROWS, hidden]` over devices that hold the others, in place. Raises ValueError.
        """
        sizes = self.sizes = weights.sizes
        _check_arena(arena, weights)
        num_slots, capacity = arena.shape[2], arena.shape[4]
        heads_per_kv = sizes.num_heads // sizes.num_kv_heads
        shape = AttentionShape(sizes.num_kv_heads, heads_per_kv, sizes.head_dim, num_splits, sizes.dtype)
        self.layout = TableLayout(num_slots, capacity, shape.rows_per_group, num_positions, sizes.vocab)
        self._weights, self._arena, self._bias = weights, arena, bias
        self._linear, self._reduce = linear, reduce
        self._angles = angles(weights.rotary, np.arange(num_positions), sizes.dtype).to(sizes.dtype).to(arena.device)
        self._allocate(num_splits, arena.device)

    def forward(self, tap: Callable[[int, Tensor], None] | None = None) -> None:
        """Run the rows that `table_buffer` tells of, as `layout` fills one: into the arena, `hidden` and `logits`.

        `tap` is shown every layer's queries `[NUM_ROWS, num_heads, head_dim]` as they meet the keys.
        """
        weights, epsilon = self._weights, self.sizes.epsilon
        embed(self._table.rows, self._table.token_ids, weights.embedding, self._state)
        delta = None
        for number, layer in enumerate(weights.layers):
            keys, values = self._arena[number]
            add_norm(self._table.rows, self._state, delta, layer.input_norm, epsilon, self._normed)
            self._mix(layer, keys, values)
            if tap is not None:
                tap(number, self._query)
            add_norm(self._table.rows, self._state, self._delta, layer.mlp_norm, epsilon, self._normed)
            self._run_mlp(layer)
            delta = self._delta
        add_norm(self._table.rows, self._state, delta, weights.final_norm, epsilon, self.hidden)
        self._linear(self.hidden, weights.head.weight, weights.head.bias, self.logits)

    def _mix(self, layer: StackedLayer, keys: Tensor, values: Tensor) -> None:
        table, sizes = self._table, self.sizes
        self._linear(self._normed, layer.query_key_value.weight, layer.query_key_value.bias, self._qkv)
        rope_store(self._qkv, self._angles, layer.head_norms, sizes.epsilon, table.rows, self._query, keys, values)
        attend(self._query, keys, values, self._bias, table, self._scratch, self._mixed, sizes.scale)
        self._linear(self._mixed.view(NUM_ROWS, -1), layer.output.weight, layer.output.bias, self._delta)
        if self._reduce is not None:
            self._reduce(self._delta)

    def _run_mlp(self, layer: StackedLayer) -> None:
        self._linear(self._normed, layer.gate_up.weight, layer.gate_up.bias, self._gate_up)
        silu_mul(self._table.rows, self._gate_up, self._gated)
        self._linear(self._gated, layer.down.weight, layer.down.bias, self._delta)
        if self._reduce is not None:
            self._reduce(self._delta)

    def _allocate(self, num_splits: int, device: torch.device) -> None:
        """Static buffers, of zeros: what padding rows have never written are numbers, too."""
        sizes = self.sizes
        heads = (sizes.num_heads, sizes.head_dim)

        def rows(*shape: int) -> Tensor:
            return torch.zeros(NUM_ROWS, *shape, dtype=sizes.dtype, device=device)

        self.table_buffer = torch.zeros(self.layout.size, dtype=torch.int32, device=device)
        self._table = self.layout.table(self.table_buffer)
        self._state, self._normed, self._delta = (rows(sizes.hidden) for _ in range(3))
        self._qkv = rows((sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim)
        self._query, self._mixed = (rows(*heads) for _ in range(2))
        self._gate_up, self._gated = rows(2 * sizes.intermediate), rows(sizes.intermediate)
        self._scratch = Scratch.empty(num_splits, *heads, device)
        self.hidden = rows(sizes.hidden)
        self.logits = torch.zeros(NUM_ROWS, sizes.vocab, device=device)


def _check_arena(arena: Tensor, weights: StackedWeights) -> None:
    sizes = weights.sizes
    expected = (len(weights.layers), 2, arena.shape[2], sizes.num_kv_heads, arena.shape[4], sizes.head_dim)
    if arena.shape != expected or arena.dtype != sizes.dtype or arena.stride(-1) != 1:
        raise ValueError(f"found an arena of {arena.dtype} {list(arena.shape)}, expected {sizes.dtype} {expected}")
