"""Scores of keys by their codes: two bits of every dimension, four of them a byte, as `source/scan_intake.c` has them.

A block of 64 keys has `[head_dim / 4, 64]` bytes. A key's score is the product of the query with its chunk's mean, and
with the level of each of its codes times the dimension's spread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from swiftbatch.worker.kernels.cuda.rounding import dot, rounded

NEAR_LEVEL = tl.constexpr(0.56640625)  # of the four levels, in mean distances: 0.566 and 1.89 as bfloat16 has them
FAR_LEVEL = tl.constexpr(1.890625)


@triton.jit
def quarter_of(
    query_ptr, spread_ptr, row_head, is_real, number, HEAD_DIM: tl.constexpr, QUARTER: tl.constexpr
):  # fmt: skip
    """Every fourth dimension of the queries from `number` on, times its spread: `[rows, QUARTER]`."""
    d = 4 * tl.arange(0, QUARTER) + number
    is_dim = d < HEAD_DIM
    mask = is_real[:, None] & is_dim[None, :]
    query = tl.load(query_ptr + row_head[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0).to(tl.float32)
    spread = tl.load(spread_ptr + d, mask=is_dim, other=0.0)
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    return rounded(query * spread[None, :], dtype).to(dtype)


@triton.jit
def levels(codes, dtype: tl.constexpr):
    """What codes of two bits stand for: 0 far below the mean, 1 near below it, 2 near above, 3 far above."""
    distance = tl.where((codes == 0) | (codes == 3), FAR_LEVEL, NEAR_LEVEL)
    return tl.where(codes < 2, -distance, distance).to(dtype)


@triton.jit
def score_block(
    first, second, third, fourth, offset, code_ptr,
    HEAD_DIM: tl.constexpr, QUARTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores `[rows, BLOCK]` of a block of codes, from the quarters of the queries and their products with the mean."""
    byte = tl.arange(0, QUARTER)
    places = byte[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    codes = tl.load(code_ptr + places, mask=(byte < HEAD_DIM // 4)[:, None], other=0).to(tl.int32)
    scores = dot(first, levels(codes & 3, first.dtype), tl.zeros([first.shape[0], BLOCK], tl.float32))
    scores = dot(second, levels((codes >> 2) & 3, first.dtype), scores)
    scores = dot(third, levels((codes >> 4) & 3, first.dtype), scores)
    scores = dot(fourth, levels((codes >> 6) & 3, first.dtype), scores)
    return scores + offset[:, None]


@triton.jit
def offset_of(query, mean_ptr, columns, HEAD_DIM: tl.constexpr):
    """Products of queries `[rows, columns]` with the mean of a chunk."""
    mean = tl.load(mean_ptr + columns, mask=columns < HEAD_DIM, other=0.0)
    return tl.sum(query.to(tl.float32) * mean[None, :], 1)
