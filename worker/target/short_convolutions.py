"""Short convolutions between gates (LFM2): their state is their last inputs alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from swiftbatch.worker.model.recurrent_sizes import RecurrentShape
from swiftbatch.worker.target.mixers import Projected, StateWalk


class ShortConvolution:
    """A `Mixer`."""

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
