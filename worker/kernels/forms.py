"""Forms and rules that layers differ in, by the numbers that the kernels know them by; and what their rows see.

Light, as sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
