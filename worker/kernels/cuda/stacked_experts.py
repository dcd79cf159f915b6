"""A layer's experts as the CUDA kernels read them: all of them one below the other, packed where the kernels unpack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftbatch.worker.kernels.cuda.packed_linear import is_multiplied_packed
from swiftbatch.worker.kernels.decoder_weights import AnyLinear, linear_from
from swiftbatch.worker.kernels.expert_weights import ExpertWeights, MayBeLatent
from swiftbatch.worker.kernels.forms import Routing
from swiftbatch.worker.kernels.packed import PackedMatrix, Weight, plain


@dataclass(frozen=True)
class StackedExperts(MayBeLatent):
    """Experts of a layer; `gate_up` has a row of gates and a row of ups in turns, or ups alone.

    With `latent` they read what its first product makes of a row, and its second one makes a row of their sum.
    `router [num_experts, hidden] float32` has one row more with the gate of the part that all rows meet.
    """

    routing: Routing
    router: Tensor
    gate_up: AnyLinear  # [num_experts * 2 * intermediate, hidden], or half as many rows
    down: AnyLinear  # [num_experts * hidden, intermediate]
    router_bias: Tensor | None = None  # [num_experts] float32
    choice_bias: Tensor | None = None  # as that
    gate_limit: float = 0.0
    gate_slope: float = 0.0
    has_gates: bool = True
    latent: tuple[AnyLinear, AnyLinear] | None = None

    @property
    def intermediate(self) -> int:
        """Columns of an expert."""
        return self.down.weight.shape[1]

    @property
    def has_share(self) -> bool:
        """True where the part that all rows meet has a gate."""
        return len(self.router) > self.routing.num_experts


def stacked_experts(experts: ExpertWeights, device: torch.device) -> StackedExperts:
    """Copies on the device. Raises ValueError where only some experts have a bias."""
    router = [each for each in (experts.router.weight, experts.shared_gate) if each is not None]
    biases = (None if each is None else each.to(device) for each in (experts.router.bias, experts.choice_bias))
    router_bias, choice_bias = biases
    in_front = [part for part in (experts.gates, experts.ups) if part]
    latent = None if experts.latent is None else [_in_turns(([each],), device) for each in experts.latent]
    return StackedExperts(
        experts.routing,
        torch.cat([each.detach().to(device) for each in router]),
        _in_turns(in_front, device),
        _in_turns((experts.downs,), device),
        router_bias,
        choice_bias,
        experts.gate_limit,
        experts.gate_slope,
        bool(experts.gates),
        None if latent is None else (latent[0], latent[1]),
    )


def _in_turns(parts: Sequence[Sequence[AnyLinear]], device: torch.device) -> AnyLinear:
    """Expert after expert; of each, a row of each part in turns."""
    biases = [[linear.bias for linear in part if linear.bias is not None] for part in parts]
    found, whole = sum(map(len, biases)), sum(map(len, parts))
    if found not in (0, whole):
        raise ValueError(f"found {found} biases of experts, expected {whole} or none")
    weight = _weights_in_turns([[linear.weight for linear in part] for part in parts], device)
    return linear_from(weight, _tensor_in_turns(biases, device) if found else None)


def _weights_in_turns(parts: list[list[Weight]], device: torch.device) -> Weight:
    packed = [[each for each in part if isinstance(each, PackedMatrix)] for part in parts]
    all_packed = [each for part in packed for each in part]
    is_packed = len(all_packed) == sum(map(len, parts)) and len({each.form for each in all_packed}) == 1
    if not is_packed or not all(map(is_multiplied_packed, all_packed)):
        return _tensor_in_turns([[plain(each) for each in part] for part in parts], device)
    offsets = [[each.offsets for each in part if each.offsets is not None] for part in packed]
    return PackedMatrix(
        all_packed[0].code,
        _tensor_in_turns([[each.codes for each in part] for part in packed], device),
        _tensor_in_turns([[each.scales for each in part] for part in packed], device),
        all_packed[0].dtype,
        _tensor_in_turns(offsets, device) if offsets[0] else None,
    )


def _tensor_in_turns(parts: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """Copied once each, to where it stays: all experts of a layer may be gigabytes."""
    first = parts[0][0]
    size = (len(parts[0]), len(first), len(parts), *first.shape[1:])
    whole = torch.empty(size, dtype=first.dtype, device=device)
    for number, part in enumerate(parts):
        for expert, tensor in enumerate(part):
            whole[expert, :, number] = tensor.detach()
    return whole.flatten(0, 2)
