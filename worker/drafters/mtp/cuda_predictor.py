"""An MTP layer on a GPU: two norms and a joining product, then the target's decoder with this one layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from swiftbatch.worker.drafters.griffin.cuda_draft_rows import CudaRows
from swiftbatch.worker.drafters.griffin.draft_layer_kernels import join, keep
from swiftbatch.worker.drafters.mtp.predictor import NUM_ENTRIES, NUM_PLACES, PredictorWeights
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.forward_interface import Forwards
from swiftbatch.worker.kernels.cuda.cuda_decoder import CudaDecoder
from swiftbatch.worker.kernels.cuda.device_caches import DeviceCaches
from swiftbatch.worker.kernels.cuda.layer_launches import Delta
from swiftbatch.worker.kernels.cuda.peers import Launch
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedWeights, stacked_layer
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.kernels.layer_specs import NormForm
from swiftbatch.worker.kernels.native_decoder import check_layers
from swiftbatch.worker.kernels.rope_scaling import Rotary
from swiftbatch.worker.kv.slot_arena import KVArena


def cuda_predictor_rows(weights: PredictorWeights, forwards: Forwards, num_candidates: int) -> CudaRows:
    """Make rows for a target in a GPU's arena. Raises ValueError or IndexError for weights that do not fit."""
    on_gpu = cast(CudaForwards, forwards)
    check_layers(weights.sizes, [weights.layer])
    sizes, num_slots = weights.sizes, on_gpu.arena.num_slots
    arena = KVArena(weights.cache_shape(on_gpu.device), num_slots, NUM_ENTRIES)
    features = torch.zeros(num_slots, NUM_PLACES, sizes.hidden, dtype=sizes.dtype, device=on_gpu.device)
    return CudaRows(CudaPredictor(weights, on_gpu, arena, features), arena, features, on_gpu, num_candidates)


class CudaPredictor(CudaDecoder):
    """One-layer decoder that reads joined rows and keeps the head's inputs.

    A row's `logits [NUM_ROWS, vocab] float32` depend only on its own tokens and features.
    """

    def __init__(self, weights: PredictorWeights, forwards: CudaForwards, arena: KVArena, features: Tensor) -> None:
        """`features [num_slots, num_places, hidden]`. Raises ValueError for sizes that the kernels do not take."""
        around, device = forwards.surroundings, forwards.device
        sizes, (rotary, turns) = replace(weights.sizes, vocab=forwards.vocab_size), around.turns
        stacked = StackedWeights(
            sizes,
            around.embedding,
            [stacked_layer(weights.layer, device, sizes.joins_heads)],
            (weights.final_norm - added_by(sizes.norm_form)).to(device, sizes.dtype),
            around.head,
            weights.rotary,
        )
        caches = DeviceCaches(arena.buffer, forwards.arena.capacity)  # rows have the target's positions
        kernels = CudaKernels(linear=forwards.kernels.linear)
        super().__init__(stacked, caches, kernels, turns if are_alike(rotary, weights.rotary) else None)
        self._norms = weights.token_norm.to(device), weights.hidden_norm.to(device)
        self._join = weights.join.to(device, sizes.dtype)
        self._feeds_normed, self._features = weights.feeds_normed, features.flatten(0, 1)
        self._pairs = torch.zeros(NUM_ROWS, 2 * sizes.hidden, dtype=sizes.dtype, device=device)

    def read_from(self, rows: Tensor, places: Tensor) -> None:
        self.take_table(rows)
        self._places = places

    def _begin(self) -> Iterator[Launch]:
        table, sources = self._table, (self._features, self._weights.embedding, *self._norms)
        yield partial(join, table.rows, table.token_ids, self._places, *sources, self.sizes.epsilon, self._pairs)
        yield partial(self._linear, self._pairs, self._join, None, self.buffers.state)

    def _end(self, delta: Delta) -> Iterator[Launch]:
        """Yield the launches of norm and head, and one that stores each row's feature in the row's own place."""
        yield from super()._end(delta)
        features = self.hidden if self._feeds_normed else self.buffers.state
        yield partial(keep, self._table.rows, self._places, features, self._features)


def added_by(form: NormForm) -> float:
    """Return the decoder norm's constant, which a predictor's weights already include."""
    return 1.0 if form == NormForm.ONE_MORE else 0.0


def are_alike(one: Rotary, other: Rotary) -> bool:
    return all(np.array_equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(Rotary))
