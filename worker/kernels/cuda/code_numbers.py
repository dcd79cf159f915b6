"""The numbers that codes of packed weights stand for, as `TABLES` has them, made of a code's bits in registers.

A code is an int32 whose higher bits are zero; its number is a float32. 2^23 = 0x4B000000 counts ones in its low bits.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from swiftbatch.worker.kernels.packed import Code


@triton.jit
def unsigned(code):
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def signed_byte(code):
    """Two's complement: its upper bit turned over is the number and 128."""
    return (code ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def e2m1(code):
    """Sign, exponent and mantissa go where float32 has them; 2^126 makes up for the exponents' biases."""
    return (((code << 28) >> 6) & -0x7E400000).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e4m3(code):
    """Sign, exponent and mantissa go where float32 has them; 2^120 makes up for the exponents' biases. Knows no NaN."""
    return (((code << 24) >> 4) & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def iq4_nl(code):
    """One of 16 bytes, each the number and 128."""
    low = tl.where((code & 4) == 0, 0x3F2D1801, 0x766A5D4F)
    high = tl.where((code & 4) == 0, -0x5966727F, -0x0E263A4B)
    byte = (tl.where((code & 8) == 0, low, high) >> ((code & 3) * 8)) & 0xFF
    return (byte | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0


DECODERS: dict[Code, Any] = {
    "uint4": unsigned,
    "e2m1": e2m1,
    "iq4_nl": iq4_nl,
    "int8": signed_byte,
    "uint8": unsigned,
    "e4m3": e4m3,
}
