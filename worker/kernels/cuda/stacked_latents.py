"""The weights of latent attention beside the stacked products of its layer, as the CUDA kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swiftbatch.worker.kernels.decoder_weights import AnyLinear, LayerWeights, plain_linear


@dataclass(frozen=True)
class StackedLatent:
    """The products within latent attention, and the norms of its vectors. Those of each head are plain.

    `query` where queries are made of a vector, `query_norm [query_rank]` with it.
    """

    query: AnyLinear | None
    query_norm: Tensor | None
    key_norm: Tensor  # [rank]
    key_up: Tensor  # [num_heads * rank, still_dim]
    value_up: Tensor  # [num_heads * value_dim, rank]


def stacked_latent(layer: LayerWeights, query: AnyLinear | None, device: torch.device) -> StackedLatent | None:
    """Copies on the device, with the `query` that is there already; None for a layer without latent attention."""
    if layer.key_up is None or layer.value_up is None or layer.key_norm is None:
        return None
    ups = (plain_linear(each).weight.detach().to(device).contiguous() for each in (layer.key_up, layer.value_up))
    query_norm = None if layer.query_norm is None else layer.query_norm.detach().to(device)
    return StackedLatent(query, query_norm, layer.key_norm.detach().to(device), *ups)
