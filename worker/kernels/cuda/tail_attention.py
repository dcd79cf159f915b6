"""Attention to the tails of rows, and the merge with their prefixes' splits: the second of attention's two launches."""

from __future__ import annotations

import triton
import triton.language as tl

from swiftbatch.worker.kernels.cuda.kv_buffers import load_kept, load_rows
from swiftbatch.worker.kernels.cuda.prefix_attention import LOG2_E, capped, first_block_of, split_blocks
from swiftbatch.worker.kernels.cuda.rounding import dot, rounded

MERGE_STAGES = tl.constexpr(4)  # splits on their way while one is folded in: copies wait for each other otherwise


@triton.jit
def merge_split(output_ptr, lse_ptr, row_head, is_real, highest, total, acc, columns, HEAD_DIM: tl.constexpr):
    """Fold in the output and LSE of one split, at the places of the row's heads."""
    part = load_rows(output_ptr + row_head[:, None] * HEAD_DIM + columns[None, :], is_real, columns, HEAD_DIM, True)
    lse = tl.load(lse_ptr + row_head, mask=is_real, other=0.0)
    return merge_part(part, lse, highest, total, acc)


@triton.jit
def merge_part(part, lse, highest, total, acc):
    """Fold in a normalised output `[rows, columns]` and its LSE `[rows]`, base 2."""
    new_highest = tl.maximum(highest, lse)
    weight = tl.exp2(lse - new_highest)
    decay = tl.exp2(highest - new_highest)
    return new_highest, total * decay + weight, acc * decay[:, None] + part * weight[:, None]


@triton.jit
def attend_tail(
    query, key_ptr, value_ptr, tail_slots_ptr, tail_length, columns, scale_log2, stride_entry,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr = 0, SOFTCAP_LOG2: tl.constexpr = 0.0,
):  # fmt: skip
    """Softmax over the tail of a row's heads: their highest scores, totals, and mixed values, not yet divided."""
    n = tl.arange(0, BLOCK)
    seen = n < tail_length  # of the values too: 0 times the NaN of an unused entry is NaN
    if WINDOW:
        seen = seen & (n >= tail_length - WINDOW)
    places = tl.load(tail_slots_ptr + n).to(tl.int64)[:, None] * stride_entry
    keys = load_kept(key_ptr + places, seen, columns, HEAD_DIM, True, query.dtype)
    scores = dot(query, tl.trans(keys), tl.zeros([query.shape[0], BLOCK], tl.float32)) * scale_log2
    scores = tl.where(seen[None, :], capped(scores, SOFTCAP_LOG2), float("-inf"))
    highest = tl.max(scores, 1)
    probabilities = tl.exp2(scores - highest[:, None])
    total = tl.sum(probabilities, 1)
    values = load_kept(value_ptr + places, seen, columns, HEAD_DIM, True, query.dtype)
    probabilities = rounded(probabilities, values.dtype).to(values.dtype)
    return highest, total, dot(probabilities, values, tl.zeros([query.shape[0], columns.shape[0]], tl.float32))


@triton.jit
def tail_merge(
    query_ptr, key_ptr, value_ptr, output_ptr, lse_ptr, mixed_ptr, rows_ptr, tail_slots_ptr, sinks_ptr,
    scale_log2, stride_slot, stride_head, stride_entry,
    NUM_ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr, LEAST_BLOCKS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP_LOG2: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Program (row, KV head): the row's tail, then a sink, and behind them the splits of its prefix in order."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    slot = tl.load(rows_ptr + row * 5).to(tl.int64)
    boundary = tl.load(rows_ptr + row * 5 + 1)
    num_blocks = tl.cdiv(boundary, BLOCK) - first_block_of(boundary, WINDOW, BLOCK)
    tail_length = tl.load(rows_ptr + row * 5 + 2)
    if tail_length == 0:
        return

    num_heads: tl.constexpr = NUM_KV_HEADS * HEADS_PER_KV
    index = tl.arange(0, TILE_ROWS)
    is_real = index < HEADS_PER_KV
    row_head = row * num_heads + kv_head * HEADS_PER_KV + index
    columns = tl.arange(0, WIDTH)
    offsets = row_head[:, None] * HEAD_DIM + columns[None, :]
    query = load_rows(query_ptr + offsets, is_real, columns, HEAD_DIM, True)
    cache = slot * stride_slot + kv_head.to(tl.int64) * stride_head
    highest, total, acc = attend_tail(
        query, key_ptr + cache, value_ptr + cache, tail_slots_ptr + row * BLOCK, tail_length, columns, scale_log2,
        stride_entry, HEAD_DIM, BLOCK, WINDOW, SOFTCAP_LOG2,
    )  # fmt: skip
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + kv_head * HEADS_PER_KV + index, mask=is_real, other=0.0) * LOG2_E
        new_highest = tl.maximum(highest, sinks)
        decay = tl.exp2(highest - new_highest)
        highest, total, acc = new_highest, total * decay + tl.exp2(sinks - new_highest), acc * decay[:, None]

    blocks_per_split = split_blocks(num_blocks, NUM_SPLITS, LEAST_BLOCKS)
    for split in tl.range(0, tl.cdiv(num_blocks, tl.maximum(blocks_per_split, 1)), num_stages=MERGE_STAGES):
        place = split * (NUM_ROWS * num_heads) + row_head
        highest, total, acc = merge_split(output_ptr, lse_ptr, place, is_real, highest, total, acc, columns, HEAD_DIM)
    is_place = is_real[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(mixed_ptr + offsets, rounded(acc / total[:, None], mixed_ptr.dtype.element_ty), mask=is_place)
