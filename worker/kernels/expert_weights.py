"""The weights of a layer's experts, and what their shapes must be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from swiftbatch.worker.kernels.packed import Weight
from swiftbatch.worker.kernels.routing import Routing
from swiftbatch.worker.kernels.sizes import LANES

if TYPE_CHECKING:
    from swiftbatch.worker.kernels.decoder_weights import AnyLinear, Linear


@dataclass(frozen=True)
class ExpertWeights:
    """Experts of which each row meets its own few.

    `router`, `choice_bias [num_experts]` and `shared_gate [1, hidden]` are float32, whatever the model's dtype: the
    choice is then the same in all builds. The last is the gate of the part that all rows meet, which lies in the
    layer's own products. With a `gate_limit` gates and ups stay within it, one is added to ups, and `gate_slope`
    multiplies what a gate's share is the sigmoid of.
    """

    routing: Routing
    router: Linear
    gates: Sequence[AnyLinear]  # by expert
    ups: Sequence[AnyLinear]
    downs: Sequence[AnyLinear]
    choice_bias: Tensor | None = None
    shared_gate: Tensor | None = None
    gate_limit: float = 0.0
    gate_slope: float = 0.0

    @property
    def intermediate(self) -> int:
        """Columns of an expert."""
        return self.ups[0].weight.shape[0]

    def linears(self) -> dict[str, Sequence[AnyLinear]]:
        """The matrices of all experts by their roles."""
        return {"gate": self.gates, "up": self.ups, "down": self.downs}


def expert_shapes(experts: ExpertWeights, hidden: int) -> Iterator[tuple[str, Weight | None, tuple[int, ...]]]:
    """Every tensor of the model's dtype with its name and the shape that it must have. Raises ValueError."""
    count, width = experts.routing.num_experts, experts.intermediate
    if width % LANES:
        raise ValueError(f"found experts of {width} columns, expected a multiple of {LANES}")
    for role, linears in experts.linears().items():
        if len(linears) != count:
            raise ValueError(f"found {len(linears)} matrices {role} of experts, expected {count}")
        shape = (hidden, width) if role == "down" else (width, hidden)
        for number, linear in enumerate(linears):
            yield f"{role} of expert {number}", linear.weight, shape
            yield f"bias of {role} of expert {number}", linear.bias, shape[:1]


def float_shapes(experts: ExpertWeights, hidden: int) -> Iterator[tuple[str, Tensor | None, tuple[int, ...]]]:
    """Every float32 tensor likewise."""
    count = experts.routing.num_experts
    yield "router", experts.router.weight, (count, hidden)
    yield "bias of router", experts.router.bias, (count,)
    yield "bias of choices", experts.choice_bias, (count,)
    yield "gate of what all rows meet", experts.shared_gate, (1, hidden)
