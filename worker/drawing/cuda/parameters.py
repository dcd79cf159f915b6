"""The table of row_words.py as kernels read it."""

from __future__ import annotations

import triton
import triton.language as tl

from swiftbatch.worker.drawing.cuda import row_words as rows

NUM_WORDS = tl.constexpr(rows.NUM_WORDS)
NUM_DRAFTED = tl.constexpr(rows.NUM_DRAFTED)
NUM_MASKED = tl.constexpr(rows.NUM_MASKED)
SEED = tl.constexpr(rows.column_of("seed"))
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
def seed_of(rows_ptr, row):
    """All 64 bits of a row's seed."""
    low = whole(rows_ptr, row, SEED).to(tl.uint32).to(tl.uint64)
    high = whole(rows_ptr, row, SEED + 1).to(tl.uint32).to(tl.uint64)
    return (high << 32) | low
