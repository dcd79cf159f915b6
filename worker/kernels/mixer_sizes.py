"""Layers with a state or a convolution in place of attention: their sizes and weights. Light to import, as sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from swiftbatch.worker.kernels.sizes import LANES

if TYPE_CHECKING:
    from torch import Tensor

    from swiftbatch.worker.kernels.decoder_weights import AnyLinear
    from swiftbatch.worker.kernels.packed import Weight

MOST_ROWS = 128  # of a sequence in a call, as source/api.h has it
MOST_HEADS = 1024  # units of a stage


class MixerForm(IntEnum):
    """`mixer_form` of source/api.h."""

    DELTA_NET = 0
    STATE_SPACE = 1  # Mamba-2
    CONVOLUTION = 2


@dataclass(frozen=True)
class MixerSizes:
    """Sizes of a layer's heads, all 0 in a convolution alone, and of the convolution; the rest is of the output.

    What heads find is normed together in groups of `norm_width`; 0 for no norm. Time steps of a state space stay within
    two limits. Two scales multiply what the mixer reads and what it gives. Raises ValueError for sizes that the kernels
    do not take.
    """

    form: MixerForm
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    num_channels: int
    conv_width: int
    norm_width: int = 0
    epsilon: float = 0.0
    least_step: float = 0.0
    most_step: float = 0.0
    in_scale: float = 1.0
    out_scale: float = 1.0

    def __post_init__(self) -> None:
        widths = (self.key_dim, self.value_dim, self.num_channels, self.norm_width)
        if any(width % LANES for width in widths) or min(widths) < 0:
            raise ValueError(f"found states and channels of {widths}, expected multiples of {LANES}")
        if not 0 <= self.num_heads <= MOST_HEADS or self.conv_width < 1 or self.num_channels < 1:
            raise ValueError(f"found {self.num_heads} heads, {self.num_channels} channels, {self.conv_width} taps")
        if (self.form == MixerForm.CONVOLUTION) == bool(self.num_heads):
            raise ValueError(f"found {self.num_heads} heads in a layer of the form {self.form.name}")
        if self.num_heads and (self.num_key_heads < 1 or self.num_heads % self.num_key_heads):
            raise ValueError(f"found {self.num_heads} heads for {self.num_key_heads} of keys")
        if self.num_heads and self.num_channels != self.width + 2 * self.num_key_heads * self.key_dim:
            raise ValueError(f"found {self.num_channels} channels, expected those of queries, keys and values")
        if self.norm_width and self.width % self.norm_width:
            raise ValueError(f"found norms of {self.norm_width} of {self.width} numbers")

    @property
    def width(self) -> int:
        """Numbers of a row in front of the last product."""
        return self.num_heads * self.value_dim if self.num_heads else self.num_channels

    def columns(self) -> dict[str, int]:
        """The columns of the products in front, by their roles."""
        if self.form == MixerForm.CONVOLUTION:
            return {"inputs": self.num_channels, "gates": self.num_channels, "betas": self.num_channels}
        betas = {"betas": self.num_heads} if self.form == MixerForm.DELTA_NET else {}
        return {"inputs": self.num_channels, "gates": self.width, **betas, "steps": self.num_heads}

    def float_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of numbers that are float32 in any model, by their roles; some of them may be absent."""
        heads = dict.fromkeys(("rates", "step_bias", "skip"), (self.num_heads,))
        taps = {"taps": (self.conv_width, self.num_channels), "tap_bias": (self.num_channels,)}
        return taps | heads | {"norm": (self.width,), "scales": (sum(self.columns().values()),)}

    def needed(self) -> set[str]:
        """The roles of float32 numbers that must be there."""
        states = {MixerForm.DELTA_NET: {"rates", "step_bias"}, MixerForm.STATE_SPACE: {"rates", "step_bias", "skip"}}
        return {"taps"} | states.get(self.form, set()) | ({"norm"} if self.norm_width else set())


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
