"""Small Triton functions that kernels share: dot products, rounding, byte-wise search."""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter has no dot of bfloat16, and cuts bits off where a GPU rounds to nearest even.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, acc):
    """`acc + a @ b`, float32; products of two bfloat16 are exact in float32, so widening changes nothing."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Float32 to the nearest number that the dtype has, or to the even one of two, as float32."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return (bits & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype).to(tl.float32)


@triton.jit
def in_one_place(numbers, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The same numbers: a sum over one of each, which Triton does not move.

    Else every warp that multiplies with a number would make it from its code: two to four do on an A100.
    """
    return tl.sum(numbers.reshape([1, ROWS, COLUMNS]), 0)


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """Float32 to the nearest number that the dtype has, of the dtype."""
    if INTERPRETED:
        x = rounded(x, dtype)
    return x.to(dtype)


# A search among many numbers, byte by byte from the highest on: four passes, where bits would take 32.


@triton.jit
def count_bytes(keys, is_counted, found, shift):
    """Count the values of a byte, `[256]`, of the keys `uint32` that count and whose bytes above are those found."""
    is_left = is_counted & (((keys >> shift) >> 8) == ((found >> shift) >> 8))
    return tl.histogram(((keys >> shift) & 255).to(tl.int32), 256, mask=is_left)


@triton.jit
def byte_at(counts, place):
    """The value of the byte at a place, from 1 on, the largest one first; and the place among those of that value."""
    values = tl.arange(0, 256)
    reached = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # numbers whose byte is this one or above
    value = tl.sum((reached >= place).to(tl.int32), 0) - 1
    return value.to(tl.uint32), place - tl.sum(tl.where(values > value, counts, 0), 0)
