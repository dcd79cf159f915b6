from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from swiftbatch.worker.kernels.decoder_weights import ExpertWeights
from swiftbatch.worker.kernels.layer_specs import Routing, Score
from swiftbatch.worker.kernels.quantized_weights import Linear

Normal = Callable[..., Tensor]


@dataclass(frozen=True)
class ExpertShape:
    """A layer's experts, and the columns of the shared part."""

    routing: Routing = field(default_factory=lambda: Routing(8, 2, Score.SOFTMAX))
    intermediate: int = 48
    shared_intermediate: int = 0
    has_shared_gate: bool = False
    has_choice_bias: bool = False
    has_bias: bool = False  # of the router and of all experts
    gate_limit: float = 0.0
    gate_slope: float = 0.0
    has_gates: bool = True
    latent: int = 0


def random_experts(shape: ExpertShape, hidden: int, normal: Normal) -> ExpertWeights:
    """`normal` makes numbers of the model's dtype."""
    count = shape.routing.num_experts

    def linear(columns: int, depth: int) -> Linear:
        return Linear(normal(columns, depth, scale=depth**-0.5), normal(columns) if shape.has_bias else None)

    def each(columns: int, depth: int) -> list[Linear]:
        return [linear(columns, depth) for _ in range(count)]

    router, width = linear(count, hidden), shape.latent or hidden
    return ExpertWeights(
        shape.routing,
        Linear(router.weight.float(), None if router.bias is None else router.bias.float()),
        gates=each(shape.intermediate, width) if shape.has_gates else [],
        ups=each(shape.intermediate, width),
        downs=each(width, shape.intermediate),
        choice_bias=0.3 * normal(count).float() if shape.has_choice_bias else None,
        shared_gate=normal(1, hidden, scale=hidden**-0.5).float() if shape.has_shared_gate else None,
        gate_limit=shape.gate_limit,
        gate_slope=shape.gate_slope,
        latent=(linear(width, hidden), linear(hidden, width)) if shape.latent else None,
    )


ALL = Score.SOFTMAX
GROUPED = Routing(12, 3, Score.SIGMOID, least_sum=1e-20, scale=2.5, num_groups=4, num_chosen_groups=2,
                  rounds_logits=False, rounds_weights=False)  # fmt: skip
UNGATED = ExpertShape(GROUPED, shared_intermediate=80, has_choice_bias=True, has_gates=False)  # as Nemotron 3
LATENT = ExpertShape(Routing(12, 3, ALL), has_bias=True, has_gates=False, latent=32)
EXPERT_SHAPES = {  # by what has them
    "qwen3_moe": ExpertShape(),
    "qwen2_moe": ExpertShape(Routing(20, 4, ALL, is_normalised=False), shared_intermediate=112, has_shared_gate=True),
    "glm4_moe": ExpertShape(GROUPED, shared_intermediate=48, has_choice_bias=True),
    "gpt_oss": ExpertShape(
        Routing(8, 4, Score.SOFTMAX_OF_CHOSEN, is_normalised=False), has_bias=True, gate_limit=2.0, gate_slope=1.702
    ),
    "one that all rows choose": ExpertShape(Routing(1, 1, ALL), intermediate=16),
}
