"""Small Triton functions that kernels share: dot products and rounding."""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter has no dot of bfloat16, and truncates where a GPU rounds to nearest even.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, acc):
    """Return `acc + a @ b` in float32, where the product of two bfloat16 numbers is exact."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round float32 to the dtype, half to even; return float32."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return (bits & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype).to(tl.float32)


@triton.jit
def in_one_place(numbers, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the same numbers summed over an axis of size 1, behind which Triton does not look for layouts."""
    return tl.sum(numbers.reshape([1, ROWS, COLUMNS]), 0)


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """Round float32 to the dtype, and return that dtype."""
    if INTERPRETED:
        x = rounded(x, dtype)
    return x.to(dtype)
