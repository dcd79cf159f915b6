"""The rows and chunks that a program of the scan works on. They are read on the device, so that graphs replay."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def group_of(groups_ptr, num_chunks_ptr, NUM_KV_HEADS: tl.constexpr):
    """The group and KV head of program 0: slot, head, first row, the row behind the last, chunks (0: padding)."""
    group_ptr = groups_ptr + tl.program_id(0) // NUM_KV_HEADS * 4
    slot = tl.load(group_ptr).to(tl.int64)
    first_row = tl.load(group_ptr + 1)
    num_rows = tl.load(group_ptr + 2)
    num_chunks = tl.where(num_rows > 0, tl.load(num_chunks_ptr + slot), 0)
    return slot, tl.program_id(0) % NUM_KV_HEADS, first_row, first_row + num_rows, num_chunks


@triton.jit
def tile_of(
    row, end, kv_head, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, TILE_ROWS: tl.constexpr
):  # fmt: skip
    """Numbers of the queries of rows from `row` on, as many as a tile has room for, and which are real."""
    index = tl.arange(0, TILE_ROWS)
    in_rows = row + index // HEADS_PER_KV
    is_real = (index < TILE_ROWS // HEADS_PER_KV * HEADS_PER_KV) & (in_rows < end)
    return in_rows * (NUM_KV_HEADS * HEADS_PER_KV) + kv_head * HEADS_PER_KV + index % HEADS_PER_KV, is_real
