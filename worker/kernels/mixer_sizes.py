"""Sizes of layers that have a state or a convolution in place of attention. Light: the command line knows them too."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from swiftbatch.worker.kernels.kernel_sizes import LANES

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
