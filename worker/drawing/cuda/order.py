"""Floats as whole numbers that are ordered alike: the best of many is then the same in whatever order it is sought."""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def order_of(x):
    """An int32 that orders float32 as it is ordered: both zeros are one, and NaN is above all."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, LARGEST, tl.where(bits < 0, bits ^ LARGEST, bits))


@triton.jit
def number_of(order):
    """The float32 that has this order."""
    return tl.where(order < 0, order ^ LARGEST, order).to(tl.float32, bitcast=True)


@triton.jit
def rank_of(x, token_ids):
    """An int64 that orders tokens by their float32 and puts the lower one of equals above the other."""
    return (order_of(x).to(tl.int64) << 32) | (token_ids ^ LARGEST).to(tl.int64)


@triton.jit
def token_of(rank):
    """The token of a rank, int32."""
    return (rank & 0xFFFFFFFF).to(tl.int32) ^ LARGEST
