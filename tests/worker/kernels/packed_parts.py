"""Random packed matrices and decoders, with dequantized twins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from swiftbatch.worker.kernels.decoder_weights import DecoderWeights
from swiftbatch.worker.kernels.quantized_weights import (
    CODE_BITS,
    AnyLinear,
    Code,
    PackedMatrix,
    linear_from,
)
from tests.worker.kernels.kernel_parts import Shape, random_weights
from tests.worker.kernels.plain_parts import plain_linear

PRODUCTS = ("query", "key", "value", "output", "gate", "up", "down")


def random_packed(
    code: Code, columns: int, depth: int, group: int, *, has_offsets: bool = False, dtype: torch.dtype = torch.bfloat16
) -> PackedMatrix:
    generator = torch.Generator().manual_seed(columns + depth)
    codes = torch.randint(0, 256, (columns, depth * CODE_BITS[code] // 8), generator=generator, dtype=torch.uint8)
    if code == "e4m3":
        codes[(codes & 127) == 127] = 1  # which are no numbers
    scales = (torch.rand(columns, depth // group, generator=generator) / depth**0.5).half().float()
    return PackedMatrix(code, codes, scales, dtype, -scales * 7 if has_offsets else None)


def packed_weights(shape: Shape, code: Code, group: int, *, has_offsets: bool = False) -> DecoderWeights:
    """Pack `random_weights`' products and untied head; `group` 0 means whole depths."""

    def packed(linear: AnyLinear) -> AnyLinear:
        columns, depth = linear.weight.shape
        matrix = random_packed(code, columns, depth, group or depth, has_offsets=has_offsets, dtype=shape.dtype)
        return linear_from(matrix, linear.bias)

    return with_products(random_weights(shape), packed)


def twin_of(weights: DecoderWeights) -> DecoderWeights:
    return with_products(weights, plain_linear)


def with_products(weights: DecoderWeights, change: Callable[[AnyLinear], AnyLinear]) -> DecoderWeights:
    layers = [
        dataclasses.replace(layer, **{name: change(getattr(layer, name)) for name in PRODUCTS})
        for layer in weights.layers
    ]
    is_tied = weights.head.weight is weights.embedding
    head = weights.head if is_tied else change(weights.head)
    return dataclasses.replace(weights, layers=layers, head=head)
