"""Latent attention in plain torch, with the kernels' roundings."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from swiftbatch.worker.kernels.decoder_weights import DecoderSizes, LayerWeights
from tests.worker.kernels.plain_parts import plain_linear

EPSILON = 1e-6  # of the norms of latent vectors, independent of the others'
Rounding = Callable[[Tensor], Tensor]
Turning = Callable[[Tensor], Tensor]  # rotates heads `[num_rows, num_heads, rope_dim]` by their positions


def latent_heads(
    normed: Tensor, weights: LayerWeights, sizes: DecoderSizes, rounded: Rounding, turned: Turning
) -> tuple[Tensor, Tensor]:
    """Return queries `[num_rows, num_heads, entry_dim]` and cache entries `[num_rows, 1, entry_dim]`."""
    latent = sizes.latent
    assert latent is not None
    rows = normed
    if latent.query_rank:
        rows = _norm(_product(normed, weights, "query_down", rounded), weights.query_norm, rounded)
    query = _product(rows, weights, "query", rounded).unflatten(1, (sizes.num_heads, -1))
    still, spun = query.split([latent.nope_dim, latent.rope_dim], dim=2)
    ups = _matrix(weights, "key_up").unflatten(0, (sizes.num_heads, -1))  # [num_heads, rank, nope_dim]
    absorbed = rounded(torch.einsum("nhd,hrd->nhr", still, ups))
    key = _product(normed, weights, "key", rounded)
    vector, shared = key.split([latent.rank, latent.rope_dim], dim=1)
    entry = torch.cat((_norm(vector, weights.key_norm, rounded)[:, None], rounded(turned(shared[:, None]))), dim=2)
    return torch.cat((absorbed, rounded(turned(spun))), dim=2).to(sizes.dtype), entry.to(sizes.dtype)


def latent_values(found: Tensor, weights: LayerWeights, sizes: DecoderSizes, rounded: Rounding) -> Tensor:
    """Return `[num_rows, num_heads * value_dim]` of heads `[num_rows, num_heads, entry_dim]`."""
    assert sizes.latent is not None
    ups = _matrix(weights, "value_up").unflatten(0, (sizes.num_heads, -1))
    return rounded(torch.einsum("nhr,hvr->nhv", found[..., : sizes.latent.rank].float(), ups)).flatten(1)


def _matrix(weights: LayerWeights, role: str) -> Tensor:
    return plain_linear(getattr(weights, role)).weight.float()


def _product(rows: Tensor, weights: LayerWeights, role: str, rounded: Rounding) -> Tensor:
    return rounded(torch.nn.functional.linear(rows, _matrix(weights, role)))


def _norm(rows: Tensor, weight: Tensor | None, rounded: Rounding) -> Tensor:
    assert weight is not None
    return rounded(rounded(rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPSILON)) * weight.float())
