"""Properties in which layers differ: norm, activation, routing, window, recurrent sizes; without heavy imports."""

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
    """Ways to apply and round a norm's weights: `norm_form` of source/api.h. In float32 the first two are equal."""

    TWICE = 0  # rounded before and after the weight, as in Llama
    ONCE = 1  # rounded only after the weight
    ONE_MORE = 2  # as `ONCE`, with 1 added to the weight, as in Gemma
    CENTRED = 3  # as `ONCE` after subtracting the mean: a LayerNorm without bias
    SHIFTED = 4  # as `CENTRED` with a bias: weights `[2 * width]`, biases last; for rows, not heads


class Activation(IntEnum):
    """Activation of a feed-forward layer, `activation` of source/api.h."""

    SILU = 0
    GELU_TANH = 1  # GELU approximated by tanh
    RELU2 = 2  # the square of positive numbers
    XIELU = 3  # has four parameters per layer, its curve


MOST_EXPERTS = 1024  # as in source/api.h
MOST_CHOSEN = 64


class Score(IntEnum):
    """Scores of experts from logits, `router_score` of source/api.h."""

    SOFTMAX = 0  # takes the logits of all experts
    SIGMOID = 1
    SOFTMAX_OF_CHOSEN = 2  # experts are chosen by logits
    SIGMOID_OF_CHOSEN = 3  # experts are chosen by logits
    SPARSE_MIXER = 4  # experts are chosen by logits; each weight is a softmax over remaining ones within `jitter`
    ROOT_SOFTPLUS = 5  # sqrt(log(1 + e^x))


@dataclass(frozen=True)
class Routing:
    """Experts of a layer, and each row's choice: the best scores, ties go to the expert with the lower index.

    With several groups, only experts of the best groups can be chosen. A group's score is the sum of its
    `num_best_of_group` best scores. Raises ValueError.
    """

    num_experts: int
    num_chosen: int
    score: Score
    is_normalised: bool = True  # weights are divided by their sum, or by `least_sum` if larger
    least_sum: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    rounds_logits: bool = True
    rounds_weights: bool = True
    jitter: float = 0.0  # for the sparse mixer
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
    """Keys that a layer's rows see, and changes of their scores."""

    window: int | None = None  # number of positions that a row sees, including its own
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # [num_heads] scores without values

    def __post_init__(self) -> None:
        if (self.window is not None and self.window < 1) or (self.softcap is not None and not self.softcap > 0):
            raise ValueError(f"found a window of {self.window} and a soft cap of {self.softcap}, expected more than 0")


SEES_ALL = AttentionView()


# Sizes and weights of layers with a state or a convolution in place of attention.


MOST_ROWS = 128  # as in source/api.h
MOST_HEADS = 1024


class RecurrentForm(IntEnum):
    """`mixer_form` of source/api.h."""

    DELTA_NET = 0
    STATE_SPACE = 1  # Mamba-2
    CONVOLUTION = 2


@dataclass(frozen=True)
class RecurrentSizes:
    """Sizes of a layer's heads (0 in a pure convolution), its convolution, and its output.

    Results are normed in groups of `norm_width`; 0 means no norm. Raises ValueError for sizes that the kernels do not
    support.
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
        """Return the width of a row before the output projection."""
        return self.num_heads * self.value_dim if self.num_heads else self.num_channels

    def columns(self) -> dict[str, int]:
        if self.form == RecurrentForm.CONVOLUTION:
            return {"inputs": self.num_channels, "gates": self.num_channels, "betas": self.num_channels}
        betas = {"betas": self.num_heads} if self.form == RecurrentForm.DELTA_NET else {}
        return {"inputs": self.num_channels, "gates": self.width, **betas, "steps": self.num_heads}

    def float_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes, by role, of the parameters that are float32 in every dtype."""
        heads = dict.fromkeys(("rates", "step_bias", "skip"), (self.num_heads,))
        taps = {"taps": (self.conv_width, self.num_channels), "tap_bias": (self.num_channels,)}
        return taps | heads | {"norm": (self.width,), "scales": (sum(self.columns().values()),)}

    def needed(self) -> set[str]:
        """Return the roles of the required float32 parameters."""
        states = {
            RecurrentForm.DELTA_NET: {"rates", "step_bias"},
            RecurrentForm.STATE_SPACE: {"rates", "step_bias", "skip"},
        }
        return {"taps"} | states.get(self.form, set()) | ({"norm"} if self.norm_width else set())


@dataclass(frozen=True)
class RecurrentWeights:
    """One layer's weights by role: projections before the state, `output` after the state, and float32 parameters."""

    sizes: RecurrentSizes
    linears: Mapping[str, AnyLinear]
    floats: Mapping[str, Tensor]


def recurrent_weight_shapes(
    mixer: RecurrentWeights, hidden: int
) -> Iterator[tuple[str, Weight | None, tuple[int, ...]]]:
    """Yield every tensor in the model's dtype with its name and expected shape. Raises ValueError."""
    widths = {role: (columns, hidden) for role, columns in mixer.sizes.columns().items()}
    widths["output"] = (hidden, mixer.sizes.width)
    if set(mixer.linears) != set(widths):
        raise ValueError(f"found the products {sorted(mixer.linears)} of a mixer, expected {sorted(widths)}")
    for role, shape in widths.items():
        yield f"{role} of a mixer", mixer.linears[role].weight, shape
        yield f"bias of {role} of a mixer", mixer.linears[role].bias, shape[:1]


def recurrent_float_shapes(mixer: RecurrentWeights) -> Iterator[tuple[str, Tensor | None, tuple[int, ...]]]:
    """Yield every float32 tensor with its name and expected shape. Raises ValueError."""
    shapes = mixer.sizes.float_shapes()
    if set(mixer.floats) - set(shapes) or mixer.sizes.needed() - set(mixer.floats):
        raise ValueError(f"found the numbers {sorted(mixer.floats)} of a mixer, expected {sorted(shapes)}")
    for role, numbers in mixer.floats.items():
        yield f"{role} of a mixer", numbers, shapes[role]


# Steps of positions in recurrent layers, and the bytes of a slot's states, without torch because plans use them.


NUM_STATES = 2  # states at the latest boundary and at the boundary before it, to roll back a block


class HeadSizes(Protocol):
    """Sizes of a layer's heads and convolution; a layer without heads is a pure convolution."""

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
    """Layout of one position's step in float32 words: keys, updates, logarithms of decays, the inputs' bits."""

    num_keys: int
    num_updates: int
    num_heads: int
    num_inputs: int
    item_size: int
    ring: int

    @classmethod
    def of(cls, sizes: HeadSizes, item_size: int, num_rows: int) -> StepLayout:
        """Return a layout for two blocks after a boundary, `num_rows` rows, and convolution inputs before them."""
        num_keys, num_updates = sizes.num_key_heads * sizes.key_dim, sizes.num_heads * sizes.value_dim
        ring = 2 * BLOCK + num_rows + sizes.conv_width - 1
        return cls(num_keys, num_updates, sizes.num_heads, sizes.num_channels, item_size, ring)

    @property
    def decays(self) -> int:
        return self.num_keys + self.num_updates

    @property
    def inputs(self) -> int:
        return self.decays + -(-self.num_heads // LANES) * LANES

    @property
    def words(self) -> int:
        return self.inputs + self.num_inputs * self.item_size // 4


def slot_bytes(sizes: HeadSizes, num_layers: int, item_size: int, num_rows: int) -> int:
    layout = StepLayout.of(sizes, item_size, num_rows)
    state = sizes.num_heads * sizes.key_dim * sizes.value_dim
    return 4 * num_layers * (NUM_STATES * state + layout.ring * layout.words)
