"""The experts of a layer, taken out of a model's tensors: matrices of one expert each, whatever they are stored in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from swiftbatch.worker.kernels.decoder_weights import AnyLinear, Linear, linear_from
from swiftbatch.worker.kernels.expert_weights import ExpertWeights
from swiftbatch.worker.kernels.packed_weights import PackedExperts, PackedMatrix, Weight, plain
from swiftbatch.worker.model.expert_config import ExpertConfig
from swiftbatch.worker.model.expert_forms import ROLES, FusedNames

Tensors = Mapping[str, Weight]
Experts = tuple[Sequence[AnyLinear], Sequence[AnyLinear], Sequence[AnyLinear]]  # gates, ups, downs


def expert_weights(tensors: Tensors, prefix: str, config: ExpertConfig, dtype: torch.dtype) -> ExpertWeights:
    """The experts of the layer whose tensors begin so. Raises ValueError for others than those of the config."""
    names, is_fused = config.names, config.is_fused(set(tensors), prefix)
    gates, ups, downs = (_fused if is_fused else _one_by_one)(tensors, prefix, config)
    shared_gate = None if not config.shared_width else _floats(tensors, prefix, names.shared_gate)
    choice_bias = _floats(tensors, prefix, names.choice_bias)
    found = ExpertWeights(
        config.routing,
        _router(tensors, prefix, config, dtype),
        gates,
        ups,
        downs,
        choice_bias=None if choice_bias is None else choice_bias.flatten(),
        shared_gate=None if shared_gate is None else shared_gate.to(dtype).float(),
        gate_limit=config.gate_limit,
        gate_slope=config.gate_slope,
        latent=_latent(tensors, prefix, config),
    )
    if (widths := (found.intermediate, found.latent_width)) != (expected := (config.width, config.latent_width)):
        raise ValueError(f"found experts of widths {widths}, expected {expected}")
    return found


def _latent(tensors: Tensors, prefix: str, config: ExpertConfig) -> tuple[AnyLinear, AnyLinear] | None:
    if not config.latent_width or config.names.latent is None:
        return None
    front, behind = (linear_from(tensors[f"{prefix}{name}.weight"]) for name in config.names.latent)
    return front, behind


def _floats(tensors: Tensors, prefix: str, name: str | None) -> Tensor | None:
    return None if name is None else plain(tensors[prefix + name]).float()


def _router(tensors: Tensors, prefix: str, config: ExpertConfig, dtype: torch.dtype) -> Linear:
    weight, bias = (_floats(tensors, prefix, name) for name in (config.names.router, config.names.router_bias))
    assert weight is not None
    if not config.form.keeps_router:
        weight, bias = (None if each is None else each.to(dtype).float() for each in (weight, bias))
    assert weight is not None
    return Linear(weight, bias)


def _one_by_one(tensors: Tensors, prefix: str, config: ExpertConfig) -> Experts:
    names, experts = config.names.each, range(config.routing.num_experts)
    assert names is not None
    gates, ups, downs = (
        [linear_from(tensors[prefix + names[role].format(each)]) for each in experts if role in names] for role in ROLES
    )
    return gates, ups, downs


def _fused(tensors: Tensors, prefix: str, config: ExpertConfig) -> Experts:
    names = config.names.fused
    assert names is not None
    hidden, width = config.hidden, config.width
    gate_up = _experts_of(tensors[prefix + names.gate_up], names, (2 * width, hidden))
    down = _experts_of(tensors[prefix + names.down], names, (hidden, width))
    gate_up_bias, down_bias = (_biases(tensors, prefix + each, names, config) for each in (names.gate_up, names.down))
    halves = (slice(0, None, 2), slice(1, None, 2)) if names.in_turns else (slice(width), slice(width, None))
    gates, ups = ([*map(_rows_of, gate_up, gate_up_bias, [half] * len(gate_up))] for half in halves)
    return gates, ups, [*map(linear_from, down, down_bias)]


def _experts_of(weight: Weight, names: FusedNames, shape: tuple[int, int]) -> Sequence[Weight]:
    """The matrix `shape` of each expert, its rows the columns of the product."""
    if isinstance(weight, PackedExperts):
        return weight.experts()
    assert isinstance(weight, Tensor)
    is_turned = weight.shape[1:] != shape if names.is_turned is None else names.is_turned
    return [each.T if is_turned else each for each in weight]


def _biases(tensors: Tensors, name: str, names: FusedNames, config: ExpertConfig) -> Sequence[Tensor | None]:
    if names.bias_suffix is None:
        return [None] * config.routing.num_experts
    return [*plain(tensors[name + names.bias_suffix])]


def _rows_of(weight: Weight, bias: Tensor | None, rows: slice) -> AnyLinear:
    chosen = weight.rows(rows) if isinstance(weight, PackedMatrix) else weight[rows]
    return linear_from(chosen, None if bias is None else bias[rows])
