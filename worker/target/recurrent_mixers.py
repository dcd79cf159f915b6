"""The recurrent layers of `transformers` models, taken apart: delta nets, Mamba-2, short convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from swiftbatch.worker.kernels.recurrence import Steps
from swiftbatch.worker.model.recurrent_sizes import RecurrentShape
from swiftbatch.worker.target.recurrent_paths import Projected, StateWalk, in_whole_tiles

EPSILON = 1e-6  # of queries' and keys' lengths, in every kind
STEEP = 20.0  # from here on the logarithm of 1 + e^x is x


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
        net = self._net
        return _by_delta_rule(
            walk, projected, net.conv1d, (net.key_dim, net.value_dim), (net.head_k_dim, net.head_v_dim)
        )

    def output(self, mixed: Tensor, gates: Tensor) -> Tensor:
        normed = self._net.norm(mixed.flatten(0, 1), gates.flatten(0, 1))
        output: Tensor = self._net.out_proj(normed.view(len(mixed), -1))
        return output

    def _betas_and_decays(self, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        rate = -self._net.A_log.float().exp() * softplus(a.float() + self._net.dt_bias)
        return b.sigmoid().float(), rate.exp()[..., None]


class DeltaAttention:
    """A `Mixer` of Kimi's delta attention (KDA): a delta net with a decay for each row of a state."""

    def __init__(self, net: Any) -> None:
        self._net = net

    def shape(self, num_layers: int) -> RecurrentShape:
        net = self._net
        heads, dims = (net.num_heads, net.num_heads), (net.head_dim, net.head_dim)
        return RecurrentShape(num_layers, *heads, *dims, net.conv_dim, net.conv_kernel_size, num_decays=net.head_dim)

    def project(self, hidden: Tensor) -> Projected:
        """Factors are betas and decays."""
        net, forget = self._net, self._net.forget_gate
        inputs = torch.cat([net.q_proj(hidden), net.k_proj(hidden), net.v_proj(hidden)], dim=-1)
        (b,) = in_whole_tiles(lambda rows: (net.b_proj(rows),), hidden)
        gates = net.g_b_proj(net.g_a_proj(hidden)).unflatten(-1, (-1, net.head_dim))
        factors = in_whole_tiles(self._betas_and_decays, b, forget.f_b_proj(forget.f_a_proj(hidden)))
        return Projected(inputs, gates.contiguous(), factors)

    def mix(self, walk: StateWalk, projected: Projected) -> Tensor:
        net = self._net
        return _by_delta_rule(walk, projected, net.conv1d, (net.qkv_dim, net.qkv_dim), (net.head_dim, net.head_dim))

    def output(self, mixed: Tensor, gates: Tensor) -> Tensor:
        normed = self._net.o_norm(mixed.flatten(0, 1), gates.flatten(0, 1))
        output: Tensor = self._net.o_proj(normed.view(len(mixed), -1))
        return output

    def _betas_and_decays(self, b: Tensor, forgotten: Tensor) -> tuple[Tensor, Tensor]:
        forget = self._net.forget_gate
        heads = (forgotten.float() + forget.dt_bias.float()).unflatten(-1, (-1, forget.head_dim))
        steps = torch.where(heads > STEEP, heads, torch.log(1.0 + heads.exp()))
        return b.sigmoid().float(), (-forget.A_log.float().exp()[0] * steps).exp()


def _by_delta_rule(
    walk: StateWalk, projected: Projected, convolution: Any, widths: tuple[int, int], dims: tuple[int, int]
) -> Tensor:
    """Compute what the rows of a delta net find; `widths` are of all keys and of all values, `dims` of a head's."""
    dtype, (betas, decays), (key_dim, value_dim) = projected.inputs.dtype, projected.factors, dims
    convolved = walk.convolved(convolution, dtype, silu)
    queries, keys, values = convolved.split([widths[0], *widths], dim=-1)
    (normed_queries,) = in_whole_tiles(_of_length_one, queries.unflatten(-1, (-1, key_dim)))
    (normed_keys,) = in_whole_tiles(_of_length_one, keys.unflatten(-1, (-1, key_dim)))
    heads = values.float().unflatten(-1, (-1, value_dim))
    return walk.take(Steps(normed_queries / key_dim**0.5, normed_keys, heads, decays, betas)).to(dtype)


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
        return steps, (-net.A_log.float().exp() * steps).exp()[..., None]


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
