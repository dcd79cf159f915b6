"""The weights of a layer's experts, and what their shapes must be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from swiftbatch.worker.kernels.forms import Routing
from swiftbatch.worker.kernels.packed import Weight
from swiftbatch.worker.kernels.sizes import LANES

if TYPE_CHECKING:
    from swiftbatch.worker.kernels.decoder_weights import AnyLinear, Linear


class MayBeLatent:
    """Experts that may read something smaller than a row, which a layer in front of them makes of it."""

    latent: tuple[AnyLinear, AnyLinear] | None

    @property
    def latent_width(self) -> int:
        """Numbers that experts read and give in place of a row's own; 0 for these."""
        return 0 if self.latent is None else self.latent[0].weight.shape[0]


@dataclass(frozen=True)
class ExpertWeights(MayBeLatent):
    """Experts of which each row meets its own few.

    `router`, `choice_bias [num_experts]` and `shared_gate [1, hidden]` are float32, whatever the model's dtype: the
    choice is then the same in all builds. The last is the gate of the part that all rows meet, which lies in the
    layer's own products. With a `gate_limit` gates and ups stay within it, one is added to ups, and `gate_slope`
    multiplies what a gate's share is the sigmoid of. Without gates, ups go through the activation alone. With `latent`,
    experts read what its first layer makes of a row, and its second one makes a row of their sum.
    """

    routing: Routing
    router: Linear
    gates: Sequence[AnyLinear]  # by expert; none where they have none
    ups: Sequence[AnyLinear]
    downs: Sequence[AnyLinear]
    choice_bias: Tensor | None = None
    shared_gate: Tensor | None = None
    gate_limit: float = 0.0
    gate_slope: float = 0.0
    latent: tuple[AnyLinear, AnyLinear] | None = None

    @property
    def intermediate(self) -> int:
        """Columns of an expert."""
        return self.ups[0].weight.shape[0]

    def linears(self) -> dict[str, Sequence[AnyLinear]]:
        """The matrices of all experts by their roles."""
        return {"gate": self.gates, "up": self.ups, "down": self.downs}


def expert_shapes(
    experts: ExpertWeights, hidden: int, has_gates: bool
) -> Iterator[tuple[str, Weight | None, tuple[int, ...]]]:
    """Every tensor of the model's dtype with its name and the shape that it must have. Raises ValueError."""
    count, width = experts.routing.num_experts, experts.intermediate
    if width % LANES:
        raise ValueError(f"found experts of {width} columns, expected a multiple of {LANES}")
    if experts.latent is not None:
        yield from _latent_shapes(experts.latent, experts.latent_width, hidden)
    hidden = experts.latent_width or hidden
    for role, linears in experts.linears().items():
        if len(linears) != (expected := count if has_gates or role != "gate" else 0):
            raise ValueError(f"found {len(linears)} matrices {role} of experts, expected {expected}")
        shape = (hidden, width) if role == "down" else (width, hidden)
        for number, linear in enumerate(linears):
            yield f"{role} of expert {number}", linear.weight, shape
            yield f"bias of {role} of expert {number}", linear.bias, shape[:1]


def _latent_shapes(
    latent: tuple[AnyLinear, AnyLinear], width: int, hidden: int
) -> Iterator[tuple[str, Weight | None, tuple[int, ...]]]:
    if width % LANES:
        raise ValueError(f"found experts that read {width} numbers, expected a multiple of {LANES}")
    for name, linear, shape in zip(("in", "out"), latent, ((width, hidden), (hidden, width)), strict=True):
        yield f"latent {name} of experts", linear.weight, shape
        yield f"bias of latent {name} of experts", linear.bias, shape[:1]


def float_shapes(experts: ExpertWeights, hidden: int) -> Iterator[tuple[str, Tensor | None, tuple[int, ...]]]:
    """Every float32 tensor likewise."""
    count = experts.routing.num_experts
    yield "router", experts.router.weight, (count, hidden)
    yield "bias of router", experts.router.bias, (count,)
    yield "bias of choices", experts.choice_bias, (count,)
    yield "gate of what all rows meet", experts.shared_gate, (1, hidden)
