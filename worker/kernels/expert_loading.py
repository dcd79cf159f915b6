"""Experts of a layer, packed for the compiled kernels one by one."""

from __future__ import annotations

import ctypes
import dataclasses

from torch import Tensor

from swiftbatch.worker.kernels.decoder_weights import AnyLinear, PackedLinear, plain_linear
from swiftbatch.worker.kernels.expert_weights import ExpertWeights
from swiftbatch.worker.kernels.quantized_rows import quantized_rows

ROUTER, CHOICE_BIAS, SHARED_GATE = range(3)  # of `expert_role` in source/api.h
EXPERT_ROLES = {"gate": 3, "up": 4, "down": 5}
LATENT_IN, LATENT_OUT = 6, 7


class CExpertSizes(ctypes.Structure):
    """`expert_sizes` of source/api.h."""

    COUNTS = ("num_experts", "num_chosen", "intermediate", "shared_intermediate", "latent")
    GROUPS = ("num_groups", "num_chosen_groups", "num_best_of_group")
    FORMS = ("score", *GROUPS, "is_normalised", "rounds_logits", "rounds_weights")
    SCALES = ("least_sum", "scale", "jitter", "gate_limit", "gate_slope")
    _fields_ = (
        *((name, ctypes.c_int32) for name in (*COUNTS, *FORMS)),
        *((name, ctypes.c_float) for name in SCALES),
    )


def load_experts(
    library: ctypes.CDLL, handle: int, layer: int, experts: ExpertWeights, shared_intermediate: int
) -> None:
    """Give a decoder the experts of a layer, before the part that all rows meet: it has so many columns, 0 for none."""
    sizes = CExpertSizes(
        intermediate=experts.intermediate,
        shared_intermediate=shared_intermediate,
        latent=experts.latent_width,
        gate_limit=experts.gate_limit,
        gate_slope=experts.gate_slope,
        **dataclasses.asdict(experts.routing),
    )
    library.decoder_experts(handle, layer, ctypes.byref(sizes))
    floats = {ROUTER: (experts.router.weight, experts.router.bias), CHOICE_BIAS: (experts.choice_bias, None)}
    for role, (weight, bias) in (floats | {SHARED_GATE: (experts.shared_gate, None)}).items():
        if weight is not None:
            with_bias = _contiguous(bias)
            weight = weight.detach().contiguous()
            library.decoder_load_expert(handle, layer, role, 0, weight.data_ptr(), _address(with_bias))
    for name, linears in experts.linears().items():
        for number, linear in enumerate(linears):
            _load_expert(library, (handle, layer, EXPERT_ROLES[name], number), linear)
    for role, linear in zip((LATENT_IN, LATENT_OUT), experts.latent or (), strict=False):
        _load_expert(library, (handle, layer, role, 0), linear)


def _load_expert(library: ctypes.CDLL, place: tuple[int, int, int, int], linear: AnyLinear) -> None:
    bias = _contiguous(linear.bias)
    if isinstance(linear, PackedLinear) and (rows := quantized_rows(linear.weight)) is not None:
        library.decoder_load_quantized_expert(*place, rows.address, _address(bias))
        return
    weight = plain_linear(linear).weight.detach().contiguous()
    library.decoder_load_expert(*place, weight.data_ptr(), _address(bias))


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
