"""Keys and values of an arena, of the run's dtype or in 8 bits: `worker/kernels/kv_codes.py` says how they lie.

What a kernel does follows from the type of the arena's pointer. Rows of codes begin at multiples of 16 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from swiftbatch.worker.kernels.cuda.packed_linear import e4m3, signed_byte
from swiftbatch.worker.kernels.cuda.rounding import in_one_place, narrowed
from swiftbatch.worker.kernels.kv_codes import LARGEST

ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: a number added to it is rounded to a whole one, in the low bits
MOST_INT8, MOST_E4M3 = (tl.constexpr(each) for each in LARGEST.values())
MOST_FLOAT = tl.constexpr(3.4e38)
SIZE_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def load_rows(pointers, seen, columns, NUM_COLUMNS: tl.constexpr, MASKED: tl.constexpr):
    """Rows of which some are unseen and columns of which some are padding; without `MASKED` neither is."""
    if MASKED:
        return tl.load(pointers, mask=seen[:, None] & (columns < NUM_COLUMNS)[None, :], other=0)
    return tl.load(pointers)


@triton.jit
def in_pool(entries, pages_ptr, mask, PAGE: tl.constexpr):
    """Entries of a slot, counted in int64: with pages as those of the pool, which the slot's row of a table tells."""
    if PAGE:
        numbers = entries.to(tl.uint32)  # whose division by a power of two is a shift
        pages = tl.load(pages_ptr + numbers // PAGE, mask=mask, other=0)
        return (pages * PAGE + (numbers % PAGE).to(tl.int32)).to(tl.int64)
    return entries.to(tl.int64)


@triton.jit
def scale_pointers(rows, HEAD_DIM: tl.constexpr):
    """Pointers to the scales of rows of codes that begin at these pointers."""
    return (rows + HEAD_DIM).to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def load_kept(rows, seen, columns, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, dtype: tl.constexpr):
    """Columns of rows that begin at `rows [num_rows, 1]`, as numbers of a dtype; as `load_rows` otherwise."""
    kept: tl.constexpr = rows.dtype.element_ty
    if kept != tl.int8 and kept != tl.uint8:
        return load_rows(rows + columns[None, :], seen, columns, HEAD_DIM, MASKED)
    scales = load_rows(scale_pointers(rows, HEAD_DIM), seen, tl.arange(0, 1), 1, MASKED)
    codes = load_rows(rows + columns[None, :], seen, columns, HEAD_DIM, MASKED).to(tl.int32) & 0xFF
    numbers = signed_byte(codes) if kept == tl.int8 else e4m3(codes)
    return narrowed(in_one_place(numbers * scales, codes.shape[0], codes.shape[1]), dtype)


@triton.jit
def int8_code(part):
    """The low byte is the code of a number from -127 to 127, rounded to the nearest, or to the even one of two."""
    part = tl.minimum(tl.maximum(part, -MOST_INT8), MOST_INT8)
    return (part + ROUNDER).to(tl.int32, bitcast=True)


@triton.jit
def e4m3_code(part):
    """The low byte is the code. Below the smallest exponent numbers lie as far apart as with it."""
    bits = part.to(tl.int32, bitcast=True)
    size = bits & SIZE_BITS
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (size.to(tl.float32, bitcast=True) * 512.0 + ROUNDER).to(tl.int32, bitcast=True) & 0xFF
    code = tl.minimum(tl.where(size < (121 << 23), small, normal), 0x7E)
    return ((bits >> 24) & 0x80) | code


@triton.jit
def store_halves(pointers, first, second, mask, HEAD_DIM: tl.constexpr):
    tl.store(pointers, first, mask=mask)
    tl.store(pointers + HEAD_DIM // 2, second, mask=mask)


@triton.jit
def store_kept(rows, first, second, columns, mask, HEAD_DIM: tl.constexpr):
    """Keep heads, in float32 by halves `[heads, columns]`, as rows that begin at `rows [heads, 1]`; zeros are padding.

    Rows without finite numbers have codes of zero: what they stand for is none either.
    """
    code: tl.constexpr = rows.dtype.element_ty
    if code == tl.int8 or code == tl.uint8:
        most = tl.maximum(first.to(tl.int32, bitcast=True) & SIZE_BITS, second.to(tl.int32, bitcast=True) & SIZE_BITS)
        largest = tl.max(tl.where(mask, most, 0), 1).to(tl.float32, bitcast=True)
        scales = tl.math.div_rn(
            largest, tl.full(largest.shape, MOST_INT8 if code == tl.int8 else MOST_E4M3, tl.float32)
        )
        is_usable = (scales > 0.0) & (scales <= MOST_FLOAT)
        divisors = tl.broadcast_to(tl.where(is_usable, scales, 1.0)[:, None], first.shape)
        first = tl.math.div_rn(tl.where(is_usable[:, None], first, 0.0), divisors)
        second = tl.math.div_rn(tl.where(is_usable[:, None], second, 0.0), divisors)
        if code == tl.int8:
            store_halves(rows + columns, int8_code(first).to(code), int8_code(second).to(code), mask, HEAD_DIM)
        else:
            store_halves(rows + columns, e4m3_code(first).to(code), e4m3_code(second).to(code), mask, HEAD_DIM)
        tl.store(scale_pointers(rows, HEAD_DIM), scales[:, None], mask=tl.max(mask.to(tl.int32), 1)[:, None] > 0)
    else:
        store_halves(rows + columns, first, second, mask, HEAD_DIM)
