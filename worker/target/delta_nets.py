"""Gated delta nets (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from swiftbatch.worker.kernels.recurrence import Steps
from swiftbatch.worker.model.recurrent_sizes import RecurrentShape
from swiftbatch.worker.target.mixers import Projected, StateWalk, in_whole_tiles

EPSILON = 1e-6  # of queries' and keys' lengths, in every kind


class DeltaNet:
    """A `Mixer`."""

    def __init__(self, net: Any) -> None:
        self._net = net

    def shape(self, num_layers: int) -> RecurrentShape:
        net = self._net
        return RecurrentShape(
            num_layers=num_layers,
            num_heads=net.num_v_heads,
            num_key_heads=net.num_k_heads,
            key_dim=net.head_k_dim,
            value_dim=net.head_v_dim,
            num_channels=net.conv_dim,
            conv_width=net.conv_kernel_size,
        )

    def project(self, hidden: Tensor) -> Projected:
        """Factors are betas and decays.

        A product with fewer than 16 columns has another order of sums for a few rows, so these have whole tiles.
        """
        net = self._net
        if hasattr(net, "in_proj_qkv"):
            inputs = net.in_proj_qkv(hidden)
            b, a = in_whole_tiles(lambda rows: (net.in_proj_b(rows), net.in_proj_a(rows)), hidden)
            gates = net.in_proj_z(hidden).unflatten(-1, (-1, net.head_v_dim))
        else:
            mixed = net.in_proj_qkvz(hidden)[None], net.in_proj_ba(hidden)[None]
            query, key, value, gates, b, a = (each[0] for each in net.fix_query_key_value_ordering(*mixed))
            inputs = torch.cat([each.flatten(1) for each in (query, key, value)], dim=-1)
        betas, decays = in_whole_tiles(self._betas_and_decays, b, a)
        return Projected(inputs, gates.contiguous(), (betas, decays))

    def mix(self, walk: StateWalk, projected: Projected) -> Tensor:
        net, (betas, decays) = self._net, projected.factors
        convolved = walk.convolved(net.conv1d, projected.inputs.dtype, silu)
        queries, keys, values = convolved.split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
        (normed_queries,) = in_whole_tiles(_of_length_one, queries.unflatten(-1, (-1, net.head_k_dim)))
        (normed_keys,) = in_whole_tiles(_of_length_one, keys.unflatten(-1, (-1, net.head_k_dim)))
        heads = values.float().unflatten(-1, (-1, net.head_v_dim))
        found = walk.take(Steps(normed_queries / net.head_k_dim**0.5, normed_keys, heads, decays, betas))
        return found.to(projected.inputs.dtype)

    def output(self, mixed: Tensor, gates: Tensor) -> Tensor:
        normed = self._net.norm(mixed.flatten(0, 1), gates.flatten(0, 1))
        output: Tensor = self._net.out_proj(normed.view(len(mixed), -1))
        return output

    def _betas_and_decays(self, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        rate = -self._net.A_log.float().exp() * softplus(a.float() + self._net.dt_bias)
        return b.sigmoid().float(), rate.exp()


def _of_length_one(heads: Tensor) -> tuple[Tensor]:
    heads = heads.float()
    return (heads * torch.rsqrt((heads * heads).sum(dim=-1, keepdim=True) + EPSILON),)
