"""The recurrent layers of `transformers` models, taken apart: gated delta nets, Mamba-2, short convolutions."""

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
    """A `Mixer` of gated delta nets (Qwen3-Next, Qwen3.5)."""

    def __init__(self, net: Any) -> None:
        self._net = net

    def shape(self, num_layers: int) -> RecurrentShape:
        return _shape(self._net, num_layers, ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim"))

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


class MambaLayer:
    """A `Mixer` of Mamba-2 (Bamba, Falcon-H1, Granite 4 h, Nemotron-H).

    Its keys are the inputs' projections B, its queries C.
    """

    def __init__(self, net: Any) -> None:
        self._net = net

    def shape(self, num_layers: int) -> RecurrentShape:
        return _shape(self._net, num_layers, ("num_heads", "n_groups", "ssm_state_size", "head_dim"))

    def project(self, hidden: Tensor) -> Projected:
        """Factors are time steps and decays."""
        net = self._net
        if hasattr(net, "mup_vector"):  # Falcon-H1 scales all parts
            projected = net.in_proj(hidden * net.ssm_in_multiplier) * net.mup_vector[0]
        else:
            projected = net.in_proj(hidden)
        gates, inputs, steps = projected.split([net.intermediate_size, net.conv_dim, net.num_heads], dim=-1)
        return Projected(inputs, gates.contiguous(), in_whole_tiles(self._steps_and_decays, steps))

    def mix(self, walk: StateWalk, projected: Projected) -> Tensor:
        net, (steps, decays) = self._net, projected.factors
        convolved = walk.convolved(net.conv1d, projected.inputs.dtype, net.act).float()
        width = net.n_groups * net.ssm_state_size
        values, keys, queries = convolved.split([net.intermediate_size, width, width], dim=-1)
        heads = values.unflatten(-1, (-1, net.head_dim))
        queries, keys = (each.unflatten(-1, (-1, net.ssm_state_size)) for each in (queries, keys))
        found = walk.take(Steps(queries, keys, heads * steps[..., None], decays))
        mixed: Tensor = found + net.D.float()[:, None] * heads
        return mixed.flatten(1)

    def output(self, mixed: Tensor, gates: Tensor) -> Tensor:
        net = self._net
        gated = net.norm(mixed, gates) if getattr(net, "mamba_rms_norm", True) else mixed * silu(gates)
        output: Tensor = net.out_proj(gated.to(gates.dtype))
        return output

    def _steps_and_decays(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        net = self._net
        steps = softplus(steps + net.dt_bias.to(steps.dtype)).clamp(*net.time_step_limit).float()
        return steps, (-net.A_log.float().exp() * steps).exp()


class ShortConvolution:
    """A `Mixer` of short convolutions between gates (LFM2): their state is their last inputs alone."""

    def __init__(self, net: Any) -> None:
        self._net = net

    def shape(self, num_layers: int) -> RecurrentShape:
        net = self._net
        return RecurrentShape(num_layers, 0, 0, 0, 0, net.conv.in_channels, net.conv_kernel_size)

    def project(self, hidden: Tensor) -> Projected:
        before, behind, values = self._net.in_proj(hidden).chunk(3, dim=-1)
        return Projected(before * values, behind)

    def mix(self, walk: StateWalk, projected: Projected) -> Tensor:
        return walk.convolved(self._net.conv, projected.inputs.dtype)

    def output(self, mixed: Tensor, gates: Tensor) -> Tensor:
        output: Tensor = self._net.out_proj((gates * mixed).contiguous())
        return output


def _shape(net: Any, num_layers: int, names: tuple[str, str, str, str]) -> RecurrentShape:
    """Sizes of a model with so many of these nets; `names` are theirs of heads, key heads, key and value dimensions."""
    return RecurrentShape(num_layers, *(getattr(net, name) for name in (*names, "conv_dim", "conv_kernel_size")))
