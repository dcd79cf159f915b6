"""The specs that layers differ in: norm, activation, routing, window, sizes of recurrent layers. Light to import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from swiftbatch.worker.kernels.kernel_sizes import BLOCK, LANES

if TYPE_CHECKING:
    from torch import Tensor

    from swiftbatch.worker.kernels.quantized_weights import AnyLinear, Weight


class NormForm(IntEnum):
    """A norm's weights and roundings: `norm_form` of source/api.h. In float32 the first two are one."""

    TWICE = 0  # rounded before the weight and after it, as Llama's
    ONCE = 1  # rounded after the weight alone
    ONE_MORE = 2  # the same with one added to the weight, as Gemma's
    CENTRED = 3  # as `ONCE`, of the distances from the mean: a LayerNorm without bias
    SHIFTED = 4  # the same with a bias: weights `[2 * width]`, biases behind; of rows, not of heads


class Activation(IntEnum):
    """The function between the products of a feed-forward layer: `activation` of source/api.h."""

    SILU = 0
    GELU_TANH = 1  # GELU in its approximation by a hyperbolic tangent
    RELU2 = 2  # the square of what is positive
    XIELU = 3  # with four numbers of each layer, its curve


MOST_EXPERTS = 1024  # of a layer: source/api.h
MOST_CHOSEN = 64  # of a row


class Score(IntEnum):
    """The scores that logits of experts become: `router_score` of source/api.h."""

    SOFTMAX = 0  # of the logits of all experts
    SIGMOID = 1
    SOFTMAX_OF_CHOSEN = 2  # experts are chosen by their logits
    SIGMOID_OF_CHOSEN = 3  # likewise
    SPARSE_MIXER = 4  # likewise; each weight is a softmax over the experts that are left and near enough, by `jitter`


@dataclass(frozen=True)
class Routing:
    """The experts of a layer and a row's choice of them: the best scores, ties to the lower number.

    With several groups, they are chosen from those groups alone whose best, `num_best_of_group` together, are the best.
    Raises ValueError for numbers that do not fit together.
    """

    num_experts: int
    num_chosen: int
    score: Score
    is_normalised: bool = True  # weights are divided by their sum, or by `least_sum` where that is more
    least_sum: float = 0.0
    scale: float = 1.0  # of the weights
    num_groups: int = 1
    num_chosen_groups: int = 1
    rounds_logits: bool = True  # to the model's dtype
    rounds_weights: bool = True
    jitter: float = 0.0  # of the sparse mixer
    num_best_of_group: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.num_chosen <= min(self.num_experts, MOST_CHOSEN) or self.num_experts > MOST_EXPERTS:
            raise ValueError(f"found {self.num_chosen} of {self.num_experts} experts for a row")
        if not 0 < self.num_chosen_groups <= self.num_groups or self.num_experts % self.num_groups:
            raise ValueError(f"found {self.num_chosen_groups} of {self.num_groups} groups of experts")
        if self.num_best_of_group < 1:
            raise ValueError(f"found groups of experts that are as good as {self.num_best_of_group} of theirs")
        if self.num_chosen > self.num_experts // self.num_groups * self.num_chosen_groups:
            raise ValueError(f"found {self.num_chosen_groups} groups of experts for {self.num_chosen} of a row")


@dataclass(frozen=True)
class AttentionView:
    """The keys that the rows of a layer see, up to their own, and the changes to their scores."""

    window: int | None = None  # positions that a row sees, the last of them its own
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # [num_heads] scores that take a share and give nothing

    def __post_init__(self) -> None:
        """Raises ValueError for a window or a soft cap of nothing."""
        if (self.window is not None and self.window < 1) or (self.softcap is not None and not self.softcap > 0):
            raise ValueError(f"found a window of {self.window} and a soft cap of {self.softcap}, expected more than 0")


SEES_ALL = AttentionView()


# Layers with a state or a convolution in place of attention: their sizes and weights. Light to import, as sizes.


MOST_ROWS = 128  # of a sequence in a call, as source/api.h has it
MOST_HEADS = 1024  # units of a stage


class RecurrentForm(IntEnum):
    """`mixer_form` of source/api.h."""

    DELTA_NET = 0
    STATE_SPACE = 1  # Mamba-2
    CONVOLUTION = 2


@dataclass(frozen=True)
class RecurrentSizes:
    """Sizes of a layer's heads, all 0 in a convolution alone, and of the convolution; the rest is of the output.

    What heads find is normed together in groups of `norm_width`; 0 for no norm. Time steps of a state space stay within
    two limits. Two scales multiply what the mixer reads and what it gives. Raises ValueError for sizes that the kernels
    do not take.
    """

    form: RecurrentForm
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
        if (self.form == RecurrentForm.CONVOLUTION) == bool(self.num_heads):
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
        if self.form == RecurrentForm.CONVOLUTION:
            return {"inputs": self.num_channels, "gates": self.num_channels, "betas": self.num_channels}
        betas = {"betas": self.num_heads} if self.form == RecurrentForm.DELTA_NET else {}
        return {"inputs": self.num_channels, "gates": self.width, **betas, "steps": self.num_heads}

    def float_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of numbers that are float32 in any model, by their roles; some of them may be absent."""
        heads = dict.fromkeys(("rates", "step_bias", "skip"), (self.num_heads,))
        taps = {"taps": (self.conv_width, self.num_channels), "tap_bias": (self.num_channels,)}
        return taps | heads | {"norm": (self.width,), "scales": (sum(self.columns().values()),)}

    def needed(self) -> set[str]:
        """The roles of float32 numbers that must be there."""
        states = {
            RecurrentForm.DELTA_NET: {"rates", "step_bias"},
            RecurrentForm.STATE_SPACE: {"rates", "step_bias", "skip"},
        }
        return {"taps"} | states.get(self.form, set()) | ({"norm"} if self.norm_width else set())


@dataclass(frozen=True)
class RecurrentWeights:
    """One layer's weights by their roles: products in front of the state, `output` behind it, and float32 numbers."""

    sizes: RecurrentSizes
    linears: Mapping[str, AnyLinear]
    floats: Mapping[str, Tensor]


def recurrent_weight_shapes(
    mixer: RecurrentWeights, hidden: int
) -> Iterator[tuple[str, Weight | None, tuple[int, ...]]]:
    """Every tensor of the model's dtype with its name and the shape that it must have. Raises ValueError."""
    widths = {role: (columns, hidden) for role, columns in mixer.sizes.columns().items()}
    widths["output"] = (hidden, mixer.sizes.width)
    if set(mixer.linears) != set(widths):
        raise ValueError(f"found the products {sorted(mixer.linears)} of a mixer, expected {sorted(widths)}")
    for role, shape in widths.items():
        yield f"{role} of a mixer", mixer.linears[role].weight, shape
        yield f"bias of {role} of a mixer", mixer.linears[role].bias, shape[:1]


def recurrent_float_shapes(mixer: RecurrentWeights) -> Iterator[tuple[str, Tensor | None, tuple[int, ...]]]:
    """Every float32 tensor likewise. Raises ValueError where one is missing or unknown."""
    shapes = mixer.sizes.float_shapes()
    if set(mixer.floats) - set(shapes) or mixer.sizes.needed() - set(mixer.floats):
        raise ValueError(f"found the numbers {sorted(mixer.floats)} of a mixer, expected {sorted(shapes)}")
    for role, numbers in mixer.floats.items():
        yield f"{role} of a mixer", numbers, shapes[role]


# The steps that positions leave in layers with a state, and the bytes of a slot's states. Without torch: for plans.


NUM_STATES = 2  # of a slot in a layer: at the newest boundary, and at the one before, so that a block can be taken back


class HeadSizes(Protocol):
    """The sizes of a layer's heads and of its convolution; without heads it is a convolution alone."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_key_heads(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def num_channels(self) -> int: ...
    @property
    def conv_width(self) -> int: ...


@dataclass(frozen=True)
class StepLayout:
    """The step of a position in a layer, in float32 words: keys, updates, logarithms of decays, the inputs' bits."""

    num_keys: int
    num_updates: int
    num_heads: int
    num_inputs: int
    item_size: int  # bytes of an input
    ring: int  # positions

    @classmethod
    def of(cls, sizes: HeadSizes, item_size: int, num_rows: int) -> StepLayout:
        """Make room for two blocks behind a boundary, `num_rows` rows behind these, and inputs in front of all."""
        num_keys, num_updates = sizes.num_key_heads * sizes.key_dim, sizes.num_heads * sizes.value_dim
        ring = 2 * BLOCK + num_rows + sizes.conv_width - 1
        return cls(num_keys, num_updates, sizes.num_heads, sizes.num_channels, item_size, ring)

    @property
    def decays(self) -> int:
        """The first word of logarithms of decays."""
        return self.num_keys + self.num_updates

    @property
    def inputs(self) -> int:
        """The first word of inputs."""
        return self.decays + -(-self.num_heads // LANES) * LANES

    @property
    def words(self) -> int:
        """Words of a step."""
        return self.inputs + self.num_inputs * self.item_size // 4


def slot_bytes(sizes: HeadSizes, num_layers: int, item_size: int, num_rows: int) -> int:
    """The bytes of a slot's states and steps in so many layers."""
    layout = StepLayout.of(sizes, item_size, num_rows)
    state = sizes.num_heads * sizes.key_dim * sizes.value_dim
    return 4 * num_layers * (NUM_STATES * state + layout.ring * layout.words)
