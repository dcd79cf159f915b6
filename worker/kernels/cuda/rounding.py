"""Products and roundings of the kernels, with what Triton's interpreter lacks: there is no GPU in the tests."""

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
