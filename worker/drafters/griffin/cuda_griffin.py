"""GRIFFIN's draft model and the target's head as CUDA kernels over fixed buffers."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from swiftbatch.worker.drafters.griffin.cuda_draft_rows import CudaRows
from swiftbatch.worker.drafters.griffin.draft_input import NUM_ENTRIES, NUM_PLACES
from swiftbatch.worker.drafters.griffin.draft_layer_kernels import add, keep, layer_norm, pair, silu
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinModel, GriffinWeights, packed_weights
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards, Surroundings
from swiftbatch.worker.forward.forward_interface import Forwards
from swiftbatch.worker.kernels.cuda.activations import activate
from swiftbatch.worker.kernels.cuda.cuda_row_table import TableLayout
from swiftbatch.worker.kernels.cuda.norm_rope_kernels import add_norm, rope_store
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_layer
from swiftbatch.worker.kernels.cuda.tree_attention import AttentionShape, Scratch, attend
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, NUM_ROWS
from swiftbatch.worker.kernels.quantized_weights import AnyLinear, Linear
from swiftbatch.worker.kernels.rope_cos_sin import angles
from swiftbatch.worker.kv.full_cache import CacheShape
from swiftbatch.worker.kv.paged_arena import KVArena


def cuda_rows(model: GriffinModel, forwards: Forwards, num_candidates: int) -> CudaRows:
    """Make rows for a target in a GPU's arena. Raises ValueError for sizes that the kernels do not take."""
    on_gpu = cast(CudaForwards, forwards)
    weights = packed_weights(model, on_gpu.vocab_size)
    sizes, device, num_slots = weights.sizes, on_gpu.device, on_gpu.arena.num_slots
    shape = CacheShape(1, sizes.num_kv_heads, sizes.head_dim, sizes.dtype, device)
    arena = KVArena(shape, num_slots, NUM_ENTRIES)
    features = torch.zeros(num_slots, NUM_PLACES, sizes.hidden, dtype=sizes.dtype, device=device)
    griffin = CudaGriffin(weights, on_gpu.surroundings, arena.buffer, features.flatten(0, 1))
    return CudaRows(griffin, arena, features, on_gpu, num_candidates)


class CudaGriffin:
    """A `CudaDraftModel` with all its buffers allocated once.

    A row's `logits [NUM_ROWS, vocab] float32` depend only on its own tokens and features.
    """

    def __init__(
        self,
        weights: GriffinWeights,
        around: Surroundings,
        arena: Tensor,
        features: Tensor,
    ) -> None:
        """Take `arena [1, 2, num_slots, num_kv_heads, capacity, head_dim]` and `features [num_places, hidden]`.

        Raises ValueError for sizes that the kernels do not take.
        """
        self._around, self._sizes = around, weights.sizes
        self._fuse, self._norms = weights.fuse, weights.parts
        self._expand, self._contract = weights.expand, weights.contract
        self._predict, self._regress = weights.predict, weights.regress
        self._layer = stacked_layer(weights.layer, arena.device)  # the unstacked weights are not kept
        self._keys, self._values = arena[0]
        self._features = features
        num_slots, capacity = arena.shape[2], arena.shape[4]
        attention = _attention(self._sizes, capacity)
        self.layout = TableLayout(num_slots, capacity, attention.rows_per_group, capacity, self._sizes.vocab)
        turns = angles(weights.rotary, np.arange(capacity), self._sizes.dtype)
        self._angles = turns.to(self._sizes.dtype).to(arena.device)
        self._allocate(weights.expansion(), attention.num_splits, arena.device)

    def read_from(self, rows: Tensor, places: Tensor) -> None:
        self._table, self._places = self.layout.table(rows), places

    def forward(self) -> None:
        table = self._table
        pair(table.rows, table.token_ids, self._places, self._features, self._around.embedding, self._pairs)
        self._run(self._pairs, self._fuse, self._state)
        self._run_layer(None if self._contract is None else self._guide(self._contract))
        self._run_head()
        self._run(self._predicted, self._around.head, self.logits)

    def _guide(self, contract: Linear) -> Tensor:
        rows, hidden = self._table.rows, self._sizes.hidden
        sources = {"feature": self._pairs[:, :hidden], "token": self._pairs[:, hidden:], "fused": self._state}
        for (source, norm), part in zip(self._norms, self._parts.split(hidden, dim=1), strict=True):
            assert norm.bias is not None
            layer_norm(rows, sources[source], norm.weight, norm.bias, part)
        wide = self._parts
        if self._expand is not None:
            self._run(wide, self._expand, self._expanded)
            silu(rows, self._expanded)
            wide = self._expanded
        self._run(wide, contract, self._delta)
        return self._delta

    def _run_layer(self, delta: Tensor | None) -> None:
        table, layer, epsilon = self._table, self._layer, self._sizes.epsilon
        assert layer.attention is not None, "a draft layer attends"
        in_front, behind = layer.attention
        add_norm(table.rows, self._state, delta, layer.input_norm, epsilon, self._normed)
        self._run(self._normed, in_front, self._qkv)
        rope_store(self._qkv, self._angles, layer.qk_norms, epsilon, table.rows, self._query, self._keys, self._values)
        attend(
            self._query, self._keys, self._values, None, table, self._scratch, self._mixed, self._sizes.scale
        )  # fmt: skip
        self._run(self._mixed.view(NUM_ROWS, -1), behind, self._delta)
        add_norm(table.rows, self._state, self._delta, layer.mlp_norm, epsilon, self._normed)
        assert layer.dense_mlp is not None, "a draft layer has no experts"
        gate_up, down = layer.dense_mlp
        self._run(self._normed, gate_up, self._gate_up)
        activate(table.rows, self._gate_up, self._gated)
        self._run(self._gated, down, self._delta)
        add(table.rows, self._state, self._delta)

    def _run_head(self) -> None:
        if self._predict is not None and self._regress is not None:
            self._run(self._state, self._predict, self._predicted)
            self._run(self._state, self._regress, self._regressed)
        keep(self._table.rows, self._places, self._regressed, self._features)

    def _run(self, rows: Tensor, linear: AnyLinear, out: Tensor) -> None:
        self._around.linear(rows, linear.weight, linear.bias, out)

    def _allocate(self, expansion: int, num_splits: int, device: torch.device) -> None:
        """Allocate zeroed buffers, since padding rows read entries never written."""
        sizes = self._sizes
        heads = (sizes.num_heads, sizes.head_dim)

        def rows(*shape: int) -> Tensor:
            return torch.zeros(NUM_ROWS, *shape, dtype=sizes.dtype, device=device)

        self._pairs, self._parts = rows(2 * sizes.hidden), rows(len(self._norms) * sizes.hidden)
        self._expanded = rows(expansion)
        self._state, self._normed, self._delta = (rows(sizes.hidden) for _ in range(3))
        self._qkv = rows((sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim)
        self._query, self._mixed = (rows(*heads) for _ in range(2))
        self._gate_up, self._gated = rows(2 * sizes.intermediate), rows(sizes.intermediate)
        self._scratch = Scratch.empty(num_splits, *heads, device)
        has_head = self._predict is not None
        self._predicted, self._regressed = (rows(sizes.hidden) if has_head else self._state for _ in range(2))
        self.logits = torch.zeros(NUM_ROWS, sizes.vocab, device=device)


def _attention(sizes: DecoderSizes, capacity: int) -> AttentionShape:
    """Return a shape with one split per block of a window."""
    heads_per_kv = sizes.num_heads // sizes.num_kv_heads
    return AttentionShape(sizes.num_kv_heads, heads_per_kv, sizes.head_dim, capacity // BLOCK, sizes.dtype)
