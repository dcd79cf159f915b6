"""A search among many numbers, byte by byte from the highest on: four passes, where bits would take 32."""

from __future__ import annotations

import triton
import triton.language as tl


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
