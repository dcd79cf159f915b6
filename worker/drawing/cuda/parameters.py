"""The table of row_words.py as kernels read it."""

from __future__ import annotations

import triton
import triton.language as tl

from swiftbatch.worker.drawing.cuda import row_words as rows

NUM_WORDS = tl.constexpr(rows.NUM_WORDS)
NUM_DRAFTED = tl.constexpr(rows.NUM_DRAFTED)
NUM_MASKED = tl.constexpr(rows.NUM_MASKED)
NOISE_KEY = tl.constexpr(rows.column_of("noise_key"))
POSITION = tl.constexpr(rows.column_of("position"))
SLOT = tl.constexpr(rows.column_of("slot"))
DEPTH = tl.constexpr(rows.column_of("depth"))
WINDOW = tl.constexpr(rows.column_of("window"))
TEMPERATURE = tl.constexpr(rows.column_of("temperature"))
PENALTY = tl.constexpr(rows.column_of("penalty"))
FREQUENCY = tl.constexpr(rows.column_of("frequency"))
PRESENCE = tl.constexpr(rows.column_of("presence"))
HAS_BIAS = tl.constexpr(rows.column_of("has_bias"))
MASKS = tl.constexpr(rows.column_of("num_masked"))
IS_RESTRICTED = tl.constexpr(rows.column_of("is_restricted"))


@triton.jit
def whole(rows_ptr, row, COLUMN: tl.constexpr):
    """A word of a row's parameters as int32."""
    return tl.load(rows_ptr + row * NUM_WORDS + COLUMN)


@triton.jit
def real(rows_ptr, row, COLUMN: tl.constexpr):
    """A word of a row's parameters as float32."""
    return tl.load(rows_ptr + row * NUM_WORDS + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def noise_key_of(rows_ptr, row):
    """All 64 bits of a row's key."""
    low = whole(rows_ptr, row, NOISE_KEY).to(tl.uint32).to(tl.uint64)
    high = whole(rows_ptr, row, NOISE_KEY + 1).to(tl.uint32).to(tl.uint64)
    return (high << 32) | low
