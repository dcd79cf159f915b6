"""The weights of layers that have a state or a convolution in place of attention, and what their shapes must be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from swiftbatch.worker.kernels.mixer_sizes import MixerSizes
from swiftbatch.worker.kernels.packed_weights import Weight

if TYPE_CHECKING:
    from swiftbatch.worker.kernels.decoder_weights import AnyLinear


@dataclass(frozen=True)
class MixerWeights:
    """One layer's weights by their roles: products in front of the state, `output` behind it, and float32 numbers."""

    sizes: MixerSizes
    linears: Mapping[str, AnyLinear]
    floats: Mapping[str, Tensor]


def mixer_shapes(mixer: MixerWeights, hidden: int) -> Iterator[tuple[str, Weight | None, tuple[int, ...]]]:
    """Every tensor of the model's dtype with its name and the shape that it must have. Raises ValueError."""
    widths = {role: (columns, hidden) for role, columns in mixer.sizes.columns().items()}
    widths["output"] = (hidden, mixer.sizes.width)
    if set(mixer.linears) != set(widths):
        raise ValueError(f"found the products {sorted(mixer.linears)} of a mixer, expected {sorted(widths)}")
    for role, shape in widths.items():
        yield f"{role} of a mixer", mixer.linears[role].weight, shape
        yield f"bias of {role} of a mixer", mixer.linears[role].bias, shape[:1]


def mixer_float_shapes(mixer: MixerWeights) -> Iterator[tuple[str, Tensor | None, tuple[int, ...]]]:
    """Every float32 tensor likewise. Raises ValueError where one is missing or unknown."""
    shapes = mixer.sizes.float_shapes()
    if set(mixer.floats) - set(shapes) or mixer.sizes.needed() - set(mixer.floats):
        raise ValueError(f"found the numbers {sorted(mixer.floats)} of a mixer, expected {sorted(shapes)}")
    for role, numbers in mixer.floats.items():
        yield f"{role} of a mixer", numbers, shapes[role]
