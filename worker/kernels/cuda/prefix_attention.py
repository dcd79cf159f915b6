"""Attention to the prefixes of sequences, cut into splits: the first of attention's two launches."""

from __future__ import annotations

import triton
import triton.language as tl

from swiftbatch.worker.kernels.cuda.kv_buffers import load_kept, load_rows
from swiftbatch.worker.kernels.cuda.rounding import dot, rounded

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(scores, SOFTCAP_LOG2: tl.constexpr):
    """Scores of base 2 with a soft cap, likewise of base 2: 0 for none."""
    if SOFTCAP_LOG2 > 0.0:
        power = tl.exp2(tl.minimum(scores * (2 * LOG2_E / SOFTCAP_LOG2), 126.0))
        return SOFTCAP_LOG2 - 2 * SOFTCAP_LOG2 / (power + 1)
    return scores


@triton.jit
def first_block_of(boundary, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """The first block of a prefix that a row at its boundary sees: of those behind it, none sees an earlier one."""
    if WINDOW:
        return tl.maximum(boundary - WINDOW + 1, 0) // BLOCK
    return 0


@triton.jit
def split_blocks(num_blocks, NUM_SPLITS: tl.constexpr, LEAST_BLOCKS: tl.constexpr):
    """The blocks of each split of a prefix: a function of the rows' own boundary."""
    blocks = tl.cdiv(num_blocks, NUM_SPLITS)
    if LEAST_BLOCKS > 1:
        blocks = tl.maximum(blocks, LEAST_BLOCKS)
    return blocks


@triton.jit
def attend_block(
    query, key_ptr, value_ptr, places, bias, unseen, scale_log2, highest, total, acc_first, acc_second,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HAS_BIAS: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP_LOG2: tl.constexpr,
):  # fmt: skip
    """One step of online softmax; keys and values lie at `places [keys, 1]` behind their pointers.

    With a window each row does not see `unseen [rows]` first keys.
    """
    whole = tl.arange(0, 2 * HALF)
    first = tl.arange(0, HALF)
    second = HALF + first
    padded: tl.constexpr = HEAD_DIM < 2 * HALF
    seen = bias > float("-inf")  # nothing is said of what lies in the other entries
    keys = load_kept(key_ptr + places, seen, whole, HEAD_DIM, HAS_BIAS or padded, query.dtype)
    scores = dot(query, tl.trans(keys), tl.zeros([query.shape[0], keys.shape[0]], tl.float32)) * scale_log2
    scores = capped(scores, SOFTCAP_LOG2)
    if HAS_BIAS:
        scores += (bias * LOG2_E)[None, :]
    if WINDOW:
        scores = tl.where(tl.arange(0, keys.shape[0])[None, :] >= unseen[:, None], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    known = new_highest
    if WINDOW:
        known = tl.where(new_highest > float("-inf"), new_highest, 0.0)  # of a row that has seen nothing yet
    probabilities = tl.exp2(scores - known[:, None])
    decay = tl.exp2(highest - known)
    total = total * decay + tl.sum(probabilities, 1)
    values_first = load_kept(value_ptr + places, seen, first, HEAD_DIM, HAS_BIAS, query.dtype)
    values_second = load_kept(value_ptr + places, seen, second, HEAD_DIM, HAS_BIAS or padded, query.dtype)
    probabilities = rounded(probabilities, values_first.dtype).to(values_first.dtype)
    acc_first = dot(probabilities, values_first, acc_first * decay[:, None])
    acc_second = dot(probabilities, values_second, acc_second * decay[:, None])
    return new_highest, total, acc_first, acc_second


@triton.jit
def places_of(block, slot, pages_ptr, stride_pages, BLOCK: tl.constexpr, PAGE: tl.constexpr):
    """Places of a block's entries; with pages of `PAGE` entries, where the slot's row `pages_ptr` tells."""
    entries = block * BLOCK + tl.arange(0, BLOCK)
    kept = entries
    if PAGE:
        page = tl.load(pages_ptr + slot * stride_pages + block * BLOCK // PAGE)
        kept = page * PAGE + entries % PAGE
    return entries, kept.to(tl.int64)


@triton.jit
def store_split(
    output_ptr, lse_ptr, row_head, is_real, highest, total, acc_first, acc_second,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Normalised output and LSE of rows, at their places `row_head` of a split."""
    first = tl.arange(0, HALF)
    output_ptr += row_head[:, None] * HEAD_DIM + first[None, :]
    tl.store(output_ptr, acc_first / total[:, None], mask=is_real[:, None])
    is_place = is_real[:, None] & (HALF + first < HEAD_DIM)[None, :]
    tl.store(output_ptr + HALF, acc_second / total[:, None], mask=is_place)
    tl.store(lse_ptr + row_head, highest + tl.log2(total), mask=is_real)


@triton.jit
def attend_blocks(
    query, key_ptr, value_ptr, bias_ptr, pages_ptr, cache, slot, start, end, boundary, first_seen,
    scale_log2, stride_entry, stride_bias, stride_pages,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HAS_BIAS: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP_LOG2: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Online softmax over the blocks from `start` to `end`: highest score, total, and both halves of the sum."""
    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    # Two accumulators, none wider than high: for sm_80 Triton lays the warps along the longer side of a chained dot,
    # and along the keys every block's probabilities would pass through shared memory.
    acc_first = tl.zeros([TILE_ROWS, HALF], tl.float32)
    acc_second = tl.zeros([TILE_ROWS, HALF], tl.float32)
    for block in range(start, end):
        entries, kept = places_of(block, slot, pages_ptr, stride_pages, BLOCK, PAGE)
        places = cache + kept[:, None] * stride_entry
        bias = tl.zeros([BLOCK], tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + slot * stride_bias + entries, mask=entries < boundary, other=float("-inf"))
        highest, total, acc_first, acc_second = attend_block(
            query, key_ptr, value_ptr, places, bias, first_seen - block * BLOCK, scale_log2, highest, total,
            acc_first, acc_second, HEAD_DIM, HALF, HAS_BIAS, WINDOW, SOFTCAP_LOG2,
        )  # fmt: skip
    if WINDOW:
        total = tl.where(total > 0.0, total, 1.0)  # of a row that sees nothing here: its LSE is -inf, its output 0
    return highest, total, acc_first, acc_second


@triton.jit
def blocks_of_split(
    boundary, split, NUM_SPLITS: tl.constexpr, LEAST_BLOCKS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr
):
    """First block of a split of a prefix, and the one behind its last."""
    num_blocks = tl.cdiv(boundary, BLOCK)  # a prefix with biases may end within a block
    first_block = first_block_of(boundary, WINDOW, BLOCK)
    blocks_per_split = split_blocks(num_blocks - first_block, NUM_SPLITS, LEAST_BLOCKS)
    start = first_block + split * blocks_per_split
    return start, tl.minimum(start + blocks_per_split, num_blocks)


@triton.jit
def rows_of_group(
    first_row, num_rows, kv_head, num_heads: tl.constexpr, HEADS_PER_KV: tl.constexpr, TILE_ROWS: tl.constexpr
):
    """Rows of a group's tile, each with one head: their numbers there, which are real, and where their heads lie."""
    index = tl.arange(0, TILE_ROWS)
    is_real = index // HEADS_PER_KV < num_rows
    row_head = (first_row + index // HEADS_PER_KV) * num_heads + kv_head * HEADS_PER_KV + index % HEADS_PER_KV
    return index, is_real, row_head


@triton.jit
def prefix_split(
    query_ptr, key_ptr, value_ptr, bias_ptr, pages_ptr, output_ptr, lse_ptr, groups_ptr, rows_ptr,
    scale_log2, stride_slot, stride_head, stride_entry, stride_bias, stride_pages,
    NUM_ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr, LEAST_BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP_LOG2: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Program (group and KV head, split): softmax over the split's blocks of keys; normalised output and LSE.

    With pages of `PAGE` entries, whole blocks, a block lies in the page that the slot's row `pages_ptr` tells.
    """
    group_ptr = groups_ptr + tl.program_id(0) // NUM_KV_HEADS * 4
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(1)
    slot = tl.load(group_ptr).to(tl.int64)
    first_row = tl.load(group_ptr + 1)
    num_rows = tl.load(group_ptr + 2)
    boundary = tl.load(group_ptr + 3)
    start, end = blocks_of_split(boundary, split, NUM_SPLITS, LEAST_BLOCKS, WINDOW, BLOCK)
    if (start >= end) | (num_rows == 0):
        return

    num_heads: tl.constexpr = NUM_KV_HEADS * HEADS_PER_KV
    index, is_real, row_head = rows_of_group(first_row, num_rows, kv_head, num_heads, HEADS_PER_KV, TILE_ROWS)
    columns = tl.arange(0, 2 * HALF)
    query = load_rows(query_ptr + row_head[:, None] * HEAD_DIM + columns[None, :], is_real, columns, HEAD_DIM, True)
    cache = slot * stride_slot + kv_head.to(tl.int64) * stride_head
    first_seen = index
    if WINDOW:
        tail_lengths = tl.load(rows_ptr + (first_row + index // HEADS_PER_KV) * 5 + 2, mask=is_real, other=WINDOW)
        first_seen = boundary + tail_lengths - WINDOW
    highest, total, acc_first, acc_second = attend_blocks(
        query, key_ptr, value_ptr, bias_ptr, pages_ptr, cache, slot, start, end, boundary, first_seen,
        scale_log2, stride_entry, stride_bias, stride_pages,
        HEAD_DIM, HALF, HAS_BIAS, WINDOW, SOFTCAP_LOG2, TILE_ROWS, BLOCK, PAGE,
    )  # fmt: skip
    row_head += split * (NUM_ROWS * num_heads)
    store_split(output_ptr, lse_ptr, row_head, is_real, highest, total, acc_first, acc_second, HEAD_DIM, HALF)
