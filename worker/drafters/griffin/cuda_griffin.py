"""GRIFFIN's draft model and the target's head as CUDA kernels over fixed buffers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor

from swiftbatch.worker.drafters.griffin.cuda_draft_rows import CudaRows
from swiftbatch.worker.drafters.griffin.draft_input import NUM_ENTRIES, NUM_PLACES
from swiftbatch.worker.drafters.griffin.draft_layer_kernels import add, keep, layer_norm, pair, silu
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinModel, GriffinWeights, packed_weights
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.forward_interface import Forwards
from swiftbatch.worker.kernels.cuda.cuda_decoder import CudaDecoder
from swiftbatch.worker.kernels.cuda.layer_launches import Delta, Launches
from swiftbatch.worker.kernels.cuda.peers import Launch
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedWeights, stacked_layer
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.kernels.quantized_weights import AnyLinear
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.slot_arena import KVArena


def cuda_rows(model: GriffinModel, forwards: Forwards, num_candidates: int) -> CudaRows:
    """Make rows for a target in a GPU's arena. Raises ValueError for sizes that the kernels do not take."""
    on_gpu = cast(CudaForwards, forwards)
    weights = packed_weights(model, on_gpu.vocab_size)
    sizes, device, num_slots = weights.sizes, on_gpu.device, on_gpu.arena.num_slots
    shape = CacheShape(1, sizes.num_kv_heads, sizes.head_dim, sizes.dtype, device)
    arena = KVArena(shape, num_slots, NUM_ENTRIES)
    features = torch.zeros(num_slots, NUM_PLACES, sizes.hidden, dtype=sizes.dtype, device=device)
    return CudaRows(CudaGriffin(weights, on_gpu, arena, features), arena, features, on_gpu, num_candidates)


class CudaGriffin(CudaDecoder):
    """One-layer decoder over fused features and tokens, with GRIFFIN's heads and the target's.

    A row's `logits [NUM_ROWS, vocab] float32` depend only on its own tokens and features.
    """

    has_parts = False  # its own kernels read the layer's result

    def __init__(self, weights: GriffinWeights, forwards: CudaForwards, arena: KVArena, features: Tensor) -> None:
        """`features [num_slots, num_places, hidden]`. Raises ValueError for sizes that the kernels do not take."""
        around, device, sizes = forwards.surroundings, forwards.device, weights.sizes
        layer, no_norm = stacked_layer(weights.layer, device), torch.empty(0, device=device)
        stacked = StackedWeights(sizes, around.embedding, [layer], no_norm, around.head, weights.rotary)
        super().__init__(stacked, arena.on_device, CudaKernels(linear=forwards.kernels.linear))
        self._features = features.flatten(0, 1)
        self._fuse, self._norms = weights.fuse, weights.parts  # the unstacked layer is not kept
        self._expand, self._contract = weights.expand, weights.contract
        self._predict, self._regress = weights.predict, weights.regress

        def rows(width: int) -> Tensor:  # zeros, since padding rows read entries never written
            return torch.zeros(NUM_ROWS, width, dtype=sizes.dtype, device=device)

        self._pairs, self._parts = rows(2 * sizes.hidden), rows(len(weights.parts) * sizes.hidden)
        self._expanded = rows(weights.expansion())
        self._regressed = self.buffers.state if weights.regress is None else rows(sizes.hidden)

    def read_from(self, rows: Tensor, places: Tensor) -> None:
        self.take_table(rows)
        self._places = places

    def _begin(self) -> Iterator[Launch]:
        table, state, delta = self._table, self.buffers.state, self.buffers.delta
        sources = self._features, self._weights.embedding
        yield partial(pair, table.rows, table.token_ids, self._places, *sources, self._pairs)
        yield self._product(self._pairs, self._fuse, state)
        if self._contract is not None:
            guided = yield from self._guided()
            yield self._product(guided, self._contract, delta)
            yield partial(add, table.rows, state, delta)

    def _end(self, delta: Delta) -> Iterator[Launch]:
        rows, state = self._table.rows, self.buffers.state
        predicted = state
        assert delta.rows is not None, "the layer has a result"
        yield partial(add, rows, state, delta.rows)
        if self._predict is not None and self._regress is not None:
            predicted = self.hidden
            yield self._product(state, self._predict, predicted)
            yield self._product(state, self._regress, self._regressed)
        yield partial(keep, rows, self._places, self._regressed, self._features)
        yield self._product(predicted, self._weights.head, self.logits)

    def _guided(self) -> Launches:
        """Find the sources of the second fusion, normed and expanded."""
        rows, hidden = self._table.rows, self.sizes.hidden
        sources = {"feature": self._pairs[:, :hidden], "token": self._pairs[:, hidden:], "fused": self.buffers.state}
        for (source, norm), part in zip(self._norms, self._parts.split(hidden, dim=1), strict=True):
            assert norm.bias is not None
            yield partial(layer_norm, rows, sources[source], norm.weight, norm.bias, part)
        if self._expand is None:
            return self._parts
        yield self._product(self._parts, self._expand, self._expanded)
        yield partial(silu, rows, self._expanded)
        return self._expanded

    def _product(self, rows: Tensor, linear: AnyLinear, out: Tensor) -> Launch:
        return partial(self._linear, rows, linear.weight, linear.bias, out)
