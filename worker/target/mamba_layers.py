"""Mamba-2 (Bamba, Falcon-H1, Granite 4 h, Nemotron-H): its keys are the inputs' projections B, its queries C."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import silu, softplus

from swiftbatch.worker.kernels.recurrence import Steps
from swiftbatch.worker.model.recurrent_sizes import RecurrentShape
from swiftbatch.worker.target.mixers import Projected, StateWalk, in_whole_tiles


class MambaLayer:
    """A `Mixer`."""

    def __init__(self, net: Any) -> None:
        self._net = net

    def shape(self, num_layers: int) -> RecurrentShape:
        net = self._net
        return RecurrentShape(
            num_layers=num_layers,
            num_heads=net.num_heads,
            num_key_heads=net.n_groups,
            key_dim=net.ssm_state_size,
            value_dim=net.head_dim,
            num_channels=net.conv_dim,
            conv_width=net.conv_kernel_size,
        )

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
