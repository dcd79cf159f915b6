"""Random packed matrices and their decoders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from swiftbatch.worker.kernels.decoder_weights import DecoderWeights, LayerWeights
from swiftbatch.worker.kernels.quantized_weights import (
    CODE_BITS,
    SIGNIFICANT_BITS,
    Code,
    Linear,
    PackedLinear,
    PackedMatrix,
)
from tests.worker.kernels.kernel_parts import Shape, random_weights
from tests.worker.kernels.plain_parts import plain_linear

LINEARS = ("query", "key", "value", "output", "gate", "up", "down")
KINDS: tuple[tuple[Code, int, bool], ...] = (  # codes, the size of a group, whether there are offsets
    ("uint4", 16, True),
    ("int8", 16, False),
    ("e2m1", 16, False),
    ("e4m3", 16, False),
    ("iq4_nl", 8, False),
    ("uint8", 2, True),
    ("uint4", 2, True),  # too small for the kernels, which take its numbers
)


def random_packed(
    code: Code,
    shape: tuple[int, int],
    group_size: int,
    *,
    offsets: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    scale_dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> PackedMatrix:
    """Scales have both signs, and some are zero."""
    num_columns, depth = shape
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (num_columns, depth * CODE_BITS[code] // 8), generator=generator, dtype=torch.uint8)
    if code == "e4m3":
        codes[(codes & 127) == 127] = 1  # which are no numbers
    numbers = torch.randn(2, num_columns, depth // group_size, generator=generator) / 64 * depth**-0.5
    numbers[:, ::7, 0] = 0
    scales, added = numbers.to(scale_dtype).float()
    if offsets:
        scales = (scales.view(torch.int32) & -(1 << SIGNIFICANT_BITS[code])).view(torch.float32)
    return PackedMatrix(code, codes, scales, dtype, 8 * added if offsets else None)


def two_level_packed(code: Code, shape: tuple[int, int], group_size: int, *, offsets: bool) -> PackedMatrix:
    """Make scales as in Q4_K and Q6_K: a half per eight groups times integers, some zero."""
    matrix = random_packed(code, shape, group_size)
    generator = torch.Generator().manual_seed(1)
    units = torch.randn(2, shape[0], shape[1] // group_size // 8, 1, generator=generator).half().float() / 512
    wholes = torch.randint(-128, 128, (2, *units.shape[1:3], 8), generator=generator)
    wholes[1] = wholes[1].abs() % 64
    wholes[:, ::3, 0], wholes[:, 1, 0, :] = 0, 0  # some of eight, and all
    scales, minima = (units * wholes).flatten(2)
    if offsets:
        scales = (units[0] * (wholes[0].abs() % 64)).flatten(1)
    return dataclasses.replace(matrix, scales=scales, offsets=-minima if offsets else None)


def packed_weights(shape: Shape) -> DecoderWeights:
    """Mix all packings within the matrices."""
    plain = random_weights(shape)
    turns = _turns()

    def packed(linear: Linear) -> PackedLinear:
        code, group_size, offsets = next(turns)
        columns, depth = linear.weight.shape
        matrix = random_packed(code, (columns, depth), group_size, offsets=offsets, dtype=shape.dtype)
        return PackedLinear(matrix, linear.bias)

    def packed_layer(layer: LayerWeights) -> LayerWeights:
        own = {name: packed(each) for name in LINEARS if (each := getattr(layer, name)) is not None}
        if layer.experts is None:
            return dataclasses.replace(layer, **own)
        parts = {f"{role}s": [*map(packed, linears)] for role, linears in layer.experts.linears().items()}
        return dataclasses.replace(layer, experts=dataclasses.replace(layer.experts, **parts), **own)

    assert isinstance(plain.head, Linear)
    return dataclasses.replace(plain, layers=[*map(packed_layer, plain.layers)], head=packed(plain.head))


def dequantized(weights: DecoderWeights) -> DecoderWeights:
    def plain_layer(layer: LayerWeights) -> LayerWeights:
        own = {name: plain_linear(each) for name in LINEARS if (each := getattr(layer, name)) is not None}
        if layer.experts is None:
            return dataclasses.replace(layer, **own)
        parts = {f"{role}s": [*map(plain_linear, linears)] for role, linears in layer.experts.linears().items()}
        return dataclasses.replace(layer, experts=dataclasses.replace(layer.experts, **parts), **own)

    assert isinstance(weights.head, PackedLinear)
    return dataclasses.replace(weights, layers=[*map(plain_layer, weights.layers)], head=plain_linear(weights.head))


def _turns() -> Iterator[tuple[Code, int, bool]]:
    while True:
        yield from KINDS
