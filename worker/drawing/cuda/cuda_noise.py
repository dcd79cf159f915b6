"""The noise of worker/drawing/noise.py where it is used: Philox4x32-10 keyed as there, on (token / 4, position)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def noise_words(key, position_low, position_high, first, BLOCK: tl.constexpr):
    """Words `[BLOCK] uint32` of the tokens from `first` on, a multiple of 4; the position comes in two words."""
    quads = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)  # four tokens share a counter
    zeros = tl.zeros_like(quads)
    low, high = zeros + position_low.to(tl.uint32), zeros + position_high.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(key, quads, low, high, zeros)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))  # in the order of the tokens


@triton.jit
def gumbel(words):
    """Standard Gumbel noise of some words, float32. The words are equal everywhere, logarithms are the device's own."""
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32: exact, inside (0, 1)
    return (-tl.log(-tl.log(uniform))).to(tl.float32)
