"""A decoder's fixed tensors on a GPU: the rows of a forward, and rotary angles."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from swiftbatch.worker.kernels.cuda.stacked_weights import StackedLayer, StackedWeights
from swiftbatch.worker.kernels.kernel_sizes import MOST_PARTS
from swiftbatch.worker.kernels.rope_cos_sin import angles, kept_as, query_scales
from swiftbatch.worker.kernels.rope_scaling import Rotary, other_rotary


@dataclass(frozen=True)
class DecoderBuffers:
    """Rows of a forward, each `[num_rows, width]`, that layers share; they begin as zeros.

    Padding rows are not written and must not hold NaN.
    """

    state: Tensor
    normed: Tensor
    delta: Tensor  # a sublayer's result
    beside: Tensor  # a mixer's result beside that of attention, or that of experts with a norm of their own
    scaled: Tensor  # attention's input, if that is scaled
    qkv: Tensor  # as wide as the widest layer's, like `mixed`, `gate_up` and `activated`
    mixed: Tensor  # [num_rows, num_heads, value_dim]
    gate_up: Tensor
    activated: Tensor
    hidden: Tensor
    features: Tensor  # outputs of layers, side by side
    logits: Tensor  # float32
    ple: Tensor  # all layers' projections for per-layer embeddings
    lowered: Tensor  # float32: what LoRA adapters make of rows; empty without any
    delta_parts: Tensor | None  # [MOST_PARTS, num_rows, hidden] float32: results that the next norm sums

    @classmethod
    def empty(cls, weights: StackedWeights, num_rows: int, has_parts: bool, device: torch.device) -> DecoderBuffers:
        sizes, layers, latent = weights.sizes, weights.layers, weights.sizes.latent

        def rows(*shape: int, dtype: torch.dtype = sizes.dtype) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

        is_beside = any(layer.attention is not None and layer.mixer is not None for layer in layers)
        is_beside |= any(layer.experts is not None and layer.experts.behind_norm is not None for layer in layers)
        attending = [layer.attention[0].weight.shape[0] for layer in layers if layer.attention is not None]
        widest = max([sizes.head_dim, *(layer.heads.head_dim for layer in layers if layer.heads is not None)])
        most_lowered = max((each.lowered_width for layer in layers for each in layer.adapters.values()), default=0)
        width = max(sizes.ple_dim, *(layer.dense_mlp[1].weight.shape[1] for layer in layers if layer.dense_mlp), 0)
        return cls(
            state=rows(sizes.hidden),
            normed=rows(sizes.hidden),
            delta=rows(sizes.hidden),
            beside=rows(sizes.hidden if is_beside else 0),
            scaled=rows(sizes.hidden if sizes.attention_in_scale != 1.0 else 0),
            qkv=rows(max(attending, default=0) if latent is None else 0),
            mixed=rows(sizes.num_heads, (sizes.value_dim or widest) if latent is None else latent.rank),
            gate_up=rows((1 + sizes.has_gates) * width),
            activated=rows(width),
            hidden=rows(sizes.hidden),
            features=rows(0),
            logits=rows(sizes.vocab, dtype=torch.float32),
            ple=rows(0 if weights.ple is None else weights.ple.table.shape[1]),
            lowered=rows(most_lowered, dtype=torch.float32),
            delta_parts=torch.zeros(MOST_PARTS, num_rows, sizes.hidden, device=device) if has_parts else None,
        )

    def narrowed(self, num_rows: int) -> DecoderBuffers:
        """Return the first rows of the same memory."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        found = {name: each[:num_rows] for name, each in given.items() if each is not None}
        if self.delta_parts is not None:
            shape = (MOST_PARTS, num_rows, self.state.shape[1])
            found["delta_parts"] = self.delta_parts.flatten()[: math.prod(shape)].view(shape)
        return DecoderBuffers(**given | found)


@dataclass(frozen=True)
class LayerAngles:
    """Rotary angles of layers in the model's dtype, `[num_rows, head_dim]`, and the factors of queries."""

    usual: Tensor
    still: Tensor  # of layers without rotation
    other: Tensor | None  # of layers that rotate in another way than most
    query_scales: Tensor | None

    @classmethod
    def of(
        cls, weights: StackedWeights, num_positions: int, device: torch.device, usual: Tensor | None = None
    ) -> LayerAngles:
        """Take the `usual` angles of another decoder, if they are equal."""
        rotary, layers, dtype = weights.rotary, weights.layers, weights.sizes.dtype
        rows = np.arange(rotary.num_rows(num_positions))

        def found(rotary: Rotary, rows: np.ndarray) -> Tensor:
            return angles(rotary, rows, dtype).to(kept_as(rotary, dtype)).to(device)

        usual = found(rotary, rows) if usual is None else usual
        still = found(rotary, np.zeros_like(rows)) if any(layer.is_nope for layer in layers) else usual
        other, scales = other_rotary(layers), None
        if rotary.growth is not None:
            scales = query_scales(rotary.growth, np.arange(num_positions), dtype).to(device)
        return cls(usual, still, None if other is None else found(other, rows), scales)

    def of_layer(self, layer: StackedLayer) -> Tensor:
        if layer.is_nope:
            return self.still
        return self.usual if layer.rotary is None or self.other is None else self.other
