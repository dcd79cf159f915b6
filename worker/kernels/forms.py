"""Forms that layers of dense decoders differ in, by the numbers that the kernels know them by. Light, as sizes."""

from __future__ import annotations

from enum import IntEnum


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
