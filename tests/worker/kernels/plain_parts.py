"""Linear layers without quantized weights."""

from __future__ import annotations

from swiftbatch.worker.kernels.quantized_weights import AnyLinear, Linear, plain


def plain_linear(linear: AnyLinear) -> Linear:
    return Linear(plain(linear.weight), linear.bias)
